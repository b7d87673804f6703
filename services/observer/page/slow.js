// The list of slow requests. Each opens as a whole.

import { byId, h, hidden, keyed } from "./dom.js";
import { clockSeconds, duration } from "./format.js";
import { besideLane, hopLane, inWords, lateness, ledgerBar, longestBeside } from "./ledger.js";

export function showSlow(state, open) {
  const span = Math.max(...state.slow.map((request) => request.ttft_s ?? 0), 1e-6);
  const list = byId("slow");
  byId("slow-note").hidden = state.slow.length === 0;
  if (state.slow.length === 0) {
    const text = state.num_requests ? "None came in the last 5 minutes." : "None came yet.";
    list.replaceChildren(h("li", { class: "none" }, text));
    return;
  }
  keyed(
    list,
    state.slow,
    (request) => request.span_id,
    () => h("li"),
    (row, request) => {
      const version = JSON.stringify([request, span]);
      if (row.version === version) return;
      row.version = version;
      const button =
        row.querySelector("button") ??
        row.appendChild(
          h("button", { type: "button", onclick: () => open(request.trace_id, request.span_id) }),
        );
      button.replaceChildren(...describe(request, state.shares, span));
    },
  );
}

function describe(request, shares, span) {
  const beside = longestBeside(request);
  return [
    h(
      "span",
      { class: "head" },
      h("span", { class: "when" }, request.ttft_s === null ? "no token" : lateness(request)),
      h("span", {}, clockSeconds(request.arrived_unix_s)),
      request.error ? h("span", { class: "error" }, request.error) : null,
      h("span", {}, request.worker_id),
      h("span", {}, [request.tenant, request.request_class].filter(Boolean).join(", ")),
      request.prompt_tokens
        ? h("span", {}, `${request.cached_tokens} of ${request.prompt_tokens} tokens cached`)
        : null,
      hidden(
        `. ${inWords(request, shares)}. ${request.hops.length} hops` +
          (beside ? `, beside them ${duration(beside)}` : "") +
          ". Open it.",
      ),
    ),
    ledgerBar(request, shares, span),
    h(
      "div",
      { class: "lanes" },
      request.hops.slice(0, beside ? 5 : 6).map((hop) => hopLane(hop, span)),
      beside ? besideLane(beside, span) : null,
    ),
  ];
}
