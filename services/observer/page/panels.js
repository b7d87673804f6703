// The parts of the page that only show.

import { byId, h, keyed, placed, show, svg } from "./dom.js";
import { change, clock, count, duration, percent, points, rate, tight } from "./format.js";
import { name } from "./ledger.js";
import { spark } from "./timeline.js";

const NOW_S = 300;
// What is smaller is noise to whoever reads.
const SMALLEST_S = 0.002;
const WORSE = 1.1;

export function showVerdict(state) {
  const { level, text } = state.headline;
  document.body.dataset.level = level;
  const words = { healthy: "Healthy", warning: "Warning", critical: "Critical", idle: "Waiting" };
  show(byId("level"), level, () => [sign(level), words[level] ?? level]);
  show(byId("headline"), text, () => tight(text));
  show(byId("next"), [level, state.findings.length, count(state.num_requests)], () => {
    if (state.findings.length) {
      const more = state.findings.length - 1;
      return h("a", { href: "#findings-title" }, `Evidence and remedy${more ? ` · ${more} more` : ""}`);
    }
    if (level === "idle") return ["Send one: ", h("code", {}, 'firsttoken generate "Why is the sky blue?"')];
    return `The doctor looked at ${count(state.num_requests)} requests.`;
  });
  const late = state.now ? duration(state.now.p95_s) : "";
  document.title = [{ critical: "✖", warning: "▲" }[level], late && `P95 ${late}`, "firsttoken"]
    .filter(Boolean).join(" ");
  show(byId("generation"), state.generation, () => `configuration ${state.generation}`);
}

export function showFigures(state, timeline) {
  const { now, before } = state;
  const ago = before ? agoOf(now ?? { begin_unix_s: state.now_unix_s - NOW_S }, before) : "";
  const compare = (field) => {
    if (!before || before[field] === null) return ["nothing before"];
    const was = `${duration(before[field])} ${ago}`;
    if (!now || now[field] === null) return [`was ${was}`];
    const isWorse = now[field] > before[field] * WORSE && now[field] - before[field] > SMALLEST_S;
    return [`${change(now[field], before[field], SMALLEST_S)} · ${was}`, isWorse];
  };
  const requests = now?.num_requests ?? 0;
  const failed = now?.num_failed ?? 0;
  const lost = state.num_dropped ? `, ${count(state.num_dropped)} hops lost` : "";
  const hit = now?.hit_rate ?? null;
  const figures = [
    ["P50 first token", duration(now?.p50_s), ...compare("p50_s")],
    ["P95 first token", duration(now?.p95_s), ...compare("p95_s")],
    ["Prompts from a cache", percent(hit), before?.hit_rate != null
      ? `${points(hit, before.hit_rate)} · ${percent(before.hit_rate)} ${ago}` : "", hit !== null && before?.hit_rate - hit > 0.05],
    ["Requests", requests ? rate(requests, NOW_S) : "0", `${failed} failed in 5 minutes${lost}`, failed > 0],
  ];
  const curves = [timeline.p50_s, timeline.p95_s, timeline.hit_rate, timeline.num_requests];
  show(byId("figures"), [figures, curves], () => figures.map(([title, value, was, isWorse], at) =>
    h("div", { class: "figure" },
      h("h2", {}, title), h("p", { class: "value" }, value),
      h("p", { class: isWorse ? "was worse" : "was" }, was), spark(curves[at]))));
}

export function showShares(state, { column, when, field }) {
  const now = column ?? state.now?.[field] ?? null;
  const before = state.before?.[field] ?? null;
  const sum = (values) => values && state.shares.reduce((total, share) => total + values[share], 0);
  byId("shares-now").textContent = when;
  byId("shares-before").textContent = state.before ? agoOf(state.now ?? { begin_unix_s: state.now_unix_s - NOW_S }, state.before) : "before";
  show(byId("shares"), [state.shares, now, before], () => [
    ...state.shares.map((share) => shareRow(share, now?.[share], before?.[share], swatch(share))),
    shareRow("first token", sum(now), sum(before), null, "sum"),
  ]);
}

function shareRow(share, now, before, mark, kind) {
  const isWorse = before !== null && before !== undefined && now > before * WORSE && now - before > SMALLEST_S;
  const changed = change(now ?? null, before ?? null, SMALLEST_S / 10);
  return h("tr", { class: kind },
    h("td", {}, mark, name(share)), h("td", {}, duration(now)), h("td", {}, duration(before)),
    h("td", { class: isWorse ? "worse" : null }, isWorse ? `▲ ${changed}` : changed));
}

const swatch = (share) => h("span", { class: `swatch ${share}` });

function agoOf(now, before) {
  return `${duration(now.begin_unix_s - before.begin_unix_s)} ago`;
}

export function showFindings(state, open) {
  const list = byId("findings");
  if (state.findings.length === 0) {
    list.replaceChildren(h("p", { class: "none" }, state.num_requests
      ? "Nothing. It looks at all requests that are kept, every few seconds." : "Nothing to look at yet."));
    return;
  }
  keyed(list, state.findings, (finding) => finding.cause,
    (finding) => h("details", { open: finding === state.findings[0] }, h("summary"), h("div", { class: "body" })),
    (row, finding) => {
      row.className = `finding ${finding.severity}`;
      show(row.firstChild, finding.summary, () => [sign(finding.severity), h("span", {}, tight(finding.summary))]);
      show(row.lastChild, finding, () => findingBody(finding, open));
    });
}

function findingBody(finding, open) {
  return [
    h("table", { class: "wide" }, h("tbody", {}, finding.evidence.map(({ name: what, value, threshold }) =>
      h("tr", {}, h("th", { scope: "row" }, what), h("td", {}, tight(value),
        threshold ? h("small", {}, `  counts from ${tight(threshold)}`) : null))))),
    finding.setting ? h("p", { class: "todo" }, "Change ", h("code", {}, `${finding.setting}: ${finding.before} → ${finding.after}`)) : null,
    h("p", { class: "todo" }, "Expected: ", tight(finding.expected)),
    finding.trace_ids.length ? h("p", { class: "traces" }, "Seen in ", finding.trace_ids.map((id) =>
      h("button", { type: "button", class: "as-link", onclick: () => open(id) }, id.slice(0, 8)))) : null,
  ];
}

export function showCache(state) {
  show(byId("cache"), state.cache, ({ tiers, predicted, prompt_tokens: total, stores }) => {
    if (!total) return none("No prompt came in the last 5 minutes.");
    const off = predicted.num_requests
      ? `Routers expected ${percent(predicted.predicted_tokens / predicted.prompt_tokens)} to be cached, and ${percent(predicted.cached_tokens / predicted.prompt_tokens)} was: `
        + `${count(predicted.over_tokens)} tokens were expected in vain, ${count(predicted.under_tokens)} were a surprise.`
      : "Routers expected nothing: the strategy does not ask what is cached.";
    return [
      bars(tiers.filter(({ tokens }) => tokens > 0).map(({ tier, share, tokens }) => [tier, share, `${percent(share)} · ${count(tokens)}`])),
      note(off),
      ...stores.map(({ tier, num_hits: hits, hit_rate: hit }) => note(`${tier} had ${percent(hit)} of the blocks it was asked for (${count(hits)}).`)),
    ];
  });
}

export function showBubbles(state) {
  show(byId("bubbles"), state.bubbles, ({ stages }) => {
    if (stages.length === 0) return none("None: whenever there was work, engines did it.");
    const longest = Math.max(...stages.map(({ share }) => share), 1e-9);
    return [
      bars(stages.map(({ stage, share, duration_s: lost }) => [name(stage), share / longest, `${duration(lost)} · ${percent(share)}`])),
      note("By the stage that held the work, and as a share of the engines' time in the last 5 minutes."),
    ];
  });
}

export function showQueues(state) {
  show(byId("queues"), state.queues, (queues) => {
    if (queues.length === 0) return none("Nobody stood in line.");
    const heads = ["class", "requests", "in line", "P50", "P95"];
    return h("table", {},
      h("thead", {}, h("tr", {}, heads.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, queues.map((queue) => h("tr", {},
        h("td", {}, queue.request_class || "–"),
        h("td", {}, count(queue.num_requests), queue.num_failed ? h("div", { class: "bad" }, `${count(queue.num_failed)} failed`) : null),
        h("td", {}, queue.num_waiting ?? "–", queue.longest ? h("div", { class: "faint" }, `up to ${count(queue.longest)}`) : null),
        h("td", {}, duration(queue.p50_s)), h("td", {}, duration(queue.p95_s))))));
  });
}

export function showGenerations(state) {
  show(byId("generations"), state.generations, (generations) => {
    if (generations.length === 0) return none("It has not changed.");
    return h("table", { class: "wide" }, h("tbody", {}, [...generations].reverse().map(({ number, since_unix_s: since, changes }) =>
      h("tr", {}, h("th", { scope: "row" }, `g${number} ${clock(since)}`),
        h("td", {}, changes.length
          ? changes.map(([key, before, after]) => h("div", {}, h("code", {}, `${key}: ${before} → ${after}`)))
          : "as it was at the start")))));
  });
}

export function showMembers(state) {
  show(byId("members"), [state.members, state.generation], () => {
    if (state.members.length === 0) return none("Nobody is there.");
    const left = state.num_members_left_out;
    return [
      h("ul", {}, state.members.map((member) => memberRow(member, state.generation))),
      left ? note(`${left} more that are ready are not shown.`) : null,
    ];
  });
}

function memberRow(member, newest) {
  const known = ["ready", "starting", "draining"].includes(member.state) ? member.state : "odd";
  const load = member.load.map(({ name: what, unit, value }) => `${figure(value, unit)} ${what}`);
  const behind = member.generation < newest ? `configuration ${member.generation}` : "";
  return h("li", { class: `member ${known}` },
    h("p", { class: "name" }, h("span", {}, member.id), h("span", { class: "state" }, member.state)),
    h("p", { class: "load" }, [...load, behind, member.detail].filter(Boolean).join(" · ") || member.address));
}

function figure(value, unit) {
  if (unit === "share") return percent(value);
  if (unit === "second") return duration(value);
  if (unit === "byte") return `${count(value / 1e6)}\u00a0MB`;
  return count(value);
}

function bars(rows) {
  return h("div", { class: "bars" }, rows.flatMap(([title, share, text]) => [
    h("span", {}, title),
    h("span", { class: "track", "aria-hidden": "true" }, placed(h("span"), 0, share)),
    h("span", { class: "number" }, text),
  ]));
}

const none = (text) => h("p", { class: "none" }, text);
const note = (text) => h("p", { class: "note" }, text);

// A shape for each level: colour alone says nothing to many.
function sign(level) {
  const shapes = {
    healthy: "M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zM4.5 8.2l2.3 2.3 4.7-4.9",
    warning: "M8 1.5 15.2 14.5H.8zM8 6v4M8 12v.6",
    critical: "M5 1h6l4 4v6l-4 4H5l-4-4V5zM5.5 5.5l5 5M10.5 5.5l-5 5",
    idle: "M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1z",
  };
  return svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", {
    d: shapes[level] ?? shapes.warning, fill: "none", stroke: "currentColor",
    "stroke-width": "1.6", "stroke-linecap": "round", "stroke-linejoin": "round",
  }));
}
