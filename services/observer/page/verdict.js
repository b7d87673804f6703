// The top of the page: what is wrong, and what it was before.

import { byId, h, show } from "./dom.js";
import { change, count, duration, percent, points, rate, tight } from "./format.js";
import { name } from "./ledger.js";
import { sign } from "./sign.js";
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
      return h(
        "a",
        { href: "#findings-title" },
        `Evidence and remedy${more ? ` · ${more} more` : ""}`,
      );
    }
    if (level === "idle")
      return ["Send one: ", h("code", {}, 'firsttoken generate "Why is the sky blue?"')];
    return `The doctor looked at ${count(state.num_requests)} requests.`;
  });
  const late = state.now ? duration(state.now.p95_s) : "";
  document.title = [{ critical: "✖", warning: "▲" }[level], late && `P95 ${late}`, "firsttoken"]
    .filter(Boolean)
    .join(" ");
  show(byId("generation"), state.generation, () => `configuration ${state.generation}`);
}

export function showFigures(state, timeline) {
  const { now, before } = state;
  const ago = agoOf(state);
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
    [
      "Prompts from a cache",
      percent(hit),
      before?.hit_rate != null
        ? `${points(hit, before.hit_rate)} · ${percent(before.hit_rate)} ${ago}`
        : "",
      hit !== null && before?.hit_rate - hit > 0.05,
    ],
    [
      "Requests",
      requests ? rate(requests, NOW_S) : "0",
      `${failed} failed in 5 minutes${lost}`,
      failed > 0,
    ],
  ];
  const curves = [timeline.p50_s, timeline.p95_s, timeline.hit_rate, timeline.num_requests];
  show(byId("figures"), [figures, curves], () =>
    figures.map(([title, value, was, isWorse], at) =>
      h(
        "div",
        { class: "figure" },
        h("h2", {}, title),
        h("p", { class: "value" }, value),
        h("p", { class: isWorse ? "was worse" : "was" }, was),
        spark(curves[at]),
      ),
    ),
  );
}

export function showShares(state, { column, when, field }) {
  const now = column ?? state.now?.[field] ?? null;
  const before = state.before?.[field] ?? null;
  const sum = (values) => values && state.shares.reduce((total, share) => total + values[share], 0);
  byId("shares-now").textContent = when;
  byId("shares-before").textContent = agoOf(state) || "before";
  show(byId("shares"), [state.shares, now, before], () => [
    ...state.shares.map((share) => shareRow(share, now?.[share], before?.[share], swatch(share))),
    shareRow("first token", sum(now), sum(before), null, "sum"),
  ]);
}

function shareRow(share, now, before, mark, kind) {
  const isWorse = before != null && now > before * WORSE && now - before > SMALLEST_S;
  const changed = change(now ?? null, before ?? null, SMALLEST_S / 10);
  return h(
    "tr",
    { class: kind },
    h("td", {}, mark, name(share)),
    h("td", {}, duration(now)),
    h("td", {}, duration(before)),
    h("td", { class: isWorse ? "worse" : null }, isWorse ? `▲ ${changed}` : changed),
  );
}

const swatch = (share) => h("span", { class: `swatch ${share}` });

function agoOf({ now_unix_s: now, before }) {
  return before ? `${duration(now - NOW_S - before.begin_unix_s)} ago` : "";
}
