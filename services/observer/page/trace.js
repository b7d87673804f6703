// One request, whole, in a dialog; its address is in the page's, so that it can be sent.

import { byId, h, hidden } from "./dom.js";
import { clockSeconds, duration, percent } from "./format.js";
import { besideLane, hopLane, lateness, ledgerBar, name } from "./ledger.js";

const TIMEOUT_MS = 8000;

export class Trace {
  constructor(shares) {
    this.shares = shares;
    this.dialog = byId("trace");
    byId("trace-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => {
      if (location.hash.startsWith("#trace="))
        history.replaceState(null, "", location.pathname + location.search);
      const from = this.from?.isConnected ? this.from : byId("slow-title");
      from.focus({ preventScroll: true });
    });
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
    window.addEventListener("hashchange", () => this.follow());
  }

  follow() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (asked.get("trace")) this.open(asked.get("trace"), asked.get("span") ?? "");
    else if (this.dialog.open) this.dialog.close();
  }

  // `span`: the outermost of the request that is meant, where a trace has several.
  async open(id, span = "") {
    const address = String(new URLSearchParams(span ? { trace: id, span } : { trace: id }));
    if (this.address === address && this.dialog.open) return;
    this.address = address;
    this.from = document.activeElement;
    byId("trace-title").textContent = "Request";
    byId("trace-body").replaceChildren(h("p", { class: "none" }, "Asking."));
    if (!this.dialog.open) this.dialog.showModal();
    byId("trace-title").focus();
    history.replaceState(null, "", `#${address}`);
    const request = await ask("requests", id, span);
    // Of the one that is shown, whichever that is where the trace has several.
    const why = request.answer && (await ask("why", id, request.answer.span_id));
    if (this.address !== address) return;
    if (request.problem) byId("trace-body").replaceChildren(h("p", {}, request.problem));
    else this.show(request.answer, why);
  }

  show(request, why) {
    byId("trace-title").textContent =
      request.ttft_s === null ? "No first token came" : `First token after ${lateness(request)}`;
    byId("trace-body").replaceChildren(
      request.error ? h("p", { class: "trace-error" }, request.error) : "",
      ledger(request, this.shares) ?? "",
      whyNotHit(why),
      hops(request),
      summary(request),
    );
  }
}

async function ask(what, id, span) {
  try {
    const path = `api/${what}/${encodeURIComponent(id)}?span=${encodeURIComponent(span)}`;
    const response = await fetch(path, {
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const answer = await response.json();
    if (response.ok) return { answer };
    return {
      problem: plain(answer.error ?? answer.message) ?? `The observer said ${response.status}.`,
    };
  } catch {
    return { problem: "The observer does not answer." };
  }
}

const plain = (error) => (typeof error === "string" ? error : error?.message);

function summary(request) {
  const facts = {
    came: clockSeconds(request.arrived_unix_s),
    took: duration(request.duration_s),
    model: request.model,
    worker: request.worker_id,
    tenant: request.tenant,
    class: request.request_class,
    configuration: request.generation ? `generation ${request.generation}` : "",
    prompt: `${request.prompt_tokens} tokens, ${request.cached_tokens} of them cached`,
    expected: request.predicted_tokens === null ? "" : `${request.predicted_tokens} tokens cached`,
    answer: `${request.output_tokens} tokens`,
    "hand-off": request.handoff_s ? duration(request.handoff_s) : "",
    "in line": request.queue_position ? `${request.queue_position} before it` : "",
    batch: request.batch_size ? `${request.batch_size} sequences in its first step` : "",
    tries: request.attempts > 1 ? String(request.attempts) : "",
    moved: request.migrations ? `${request.migrations} times to another worker` : "",
  };
  return h(
    "section",
    {},
    h("h3", {}, "What it was"),
    table(Object.entries(facts).filter(([, value]) => value)),
    h("p", { class: "note" }, h("code", {}, request.trace_id)),
  );
}

function ledger(request, shares) {
  const total = request.ttft_s;
  if (total === null) return null;
  const rows = shares.map((share) => {
    const seconds = request.spent_s[share] ?? 0;
    return h(
      "tr",
      {},
      h("td", {}, h("span", { class: `swatch ${share}` }), name(share)),
      h("td", {}, duration(seconds)),
      h("td", {}, total ? percent(seconds / total) : ""),
    );
  });
  return h(
    "section",
    {},
    h("h3", {}, "Its ledger"),
    ledgerBar(request, shares, total || 1e-6),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        rows,
        h("tr", {}, h("td", {}, "first token"), h("td", {}, duration(total)), h("td", {})),
      ),
    ),
  );
}

function hops(request) {
  const span = Math.max(request.ttft_s ?? request.duration_s, 1e-6);
  return h(
    "section",
    {},
    h("h3", {}, "Its hops"),
    request.hops.map((hop) =>
      h(
        "div",
        { class: "hop" },
        h(
          "div",
          { class: "who" },
          h("span", {}, `${"› ".repeat(hop.depth)}${hop.name}`),
          h("span", { class: "faint" }, hop.member_id),
          h(
            "span",
            { class: "faint" },
            hop.first_token_s === null
              ? `ended after ${duration(hop.ended_s)}`
              : `first token after ${duration(hop.first_token_s)}`,
          ),
        ),
        hop.error ? h("p", { class: "error" }, hop.error) : null,
        hopLane(hop, span),
        hidden(
          hop.parts
            .map(([segment, start, end]) => `${name(segment)} ${duration(end - start)}`)
            .join(", "),
        ),
        Object.entries(hop.hidden_s).map(([work, seconds]) =>
          h(
            "div",
            {},
            h("small", {}, `beside: ${work}, ${duration(seconds)}`),
            besideLane(seconds, span),
          ),
        ),
        h(
          "details",
          {},
          h("summary", {}, `attributes of ${hop.name}`),
          table(Object.entries(hop.attributes ?? {})),
        ),
      ),
    ),
    h(
      "p",
      { class: "note" },
      "A hop is drawn in the middle of the time in which its caller waited for it: no two clocks are compared.",
    ),
  );
}

function whyNotHit(why) {
  const section = (...children) =>
    h(
      "section",
      {},
      h("h3", {}, why.answer?.cause === "hit" ? "A hit" : "Why not a hit"),
      children,
    );
  if (why.problem) return section(h("p", { class: "none" }, why.problem));
  const { summary, lost_tokens: lost, evidence, also, difference, change } = why.answer;
  return section(
    h(
      "div",
      { class: "why" },
      h("p", {}, sentence(summary)),
      lost ? h("p", { class: "faint" }, `${lost} tokens were computed for it.`) : null,
      (evidence ?? []).map((each) => h("p", { class: "faint" }, sentence(each))),
    ),
    (also ?? []).map((each) =>
      h("p", { class: "note" }, `Also, for ${each.lost_tokens} tokens: ${each.summary}.`),
    ),
    table([...flat(difference ?? {}), ...flat(change ?? {})]),
  );
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function table(rows) {
  return h(
    "table",
    { class: "wide" },
    h(
      "tbody",
      {},
      rows.map(([key, value]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, key),
          h("td", {}, typeof value === "string" ? value : JSON.stringify(value)),
        ),
      ),
    ),
  );
}

// Of nested answers, one row a value.
function flat(value, path = "") {
  return Object.entries(value).flatMap(([key, inner]) => {
    const at = (path ? `${path} ${key}` : key).replaceAll("_", " ");
    if (inner === null || inner === "" || inner.length === 0) return [];
    return typeof inner === "object" && !Array.isArray(inner) ? flat(inner, at) : [[at, inner]];
  });
}
