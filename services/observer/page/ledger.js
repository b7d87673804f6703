// One request as bars: what its time to the first token went for, and its hops.

import { h, placed } from "./dom.js";
import { duration } from "./format.js";

// The shares one after the other, on an axis that is `span` seconds long.
export function ledgerBar(request, shares, span) {
  let left = 0;
  const bars = shares.map((share) => {
    const seconds = Math.max(request.spent_s[share] ?? 0, 0);
    if (seconds === 0) return null;
    const bar = placed(h("span", { class: share }), left / span, seconds / span);
    left += seconds;
    return bar;
  });
  return h("div", { class: "ledger", "aria-hidden": "true" }, bars);
}

// Where a hop lies on the outermost hop's axis, and what it measured.
export function hopLane(hop, span) {
  const end = hop.first_token_s ?? hop.ended_s;
  const parts = hop.parts.map(([segment, start, stop]) =>
    placed(h("span", { class: segment }), (hop.offset_s + start) / span, (stop - start) / span),
  );
  const lane = h(
    "div",
    { class: "lane", "aria-hidden": "true" },
    placed(h("span", { class: "extent" }), hop.offset_s / span, end / span),
    parts,
  );
  if (hop.first_token_s !== null) {
    const mark = h("span", { class: "first" });
    mark.style.left = `calc(${Math.min((hop.offset_s + end) / span, 1) * 100}% - 2px)`;
    lane.append(mark);
  }
  return lane;
}

// Work beside the critical path has a length and no place.
export function besideLane(seconds, span) {
  return h(
    "div",
    { class: "lane", "aria-hidden": "true" },
    placed(h("span", { class: "beside" }), 0, seconds / span),
  );
}

export function longestBeside(request) {
  return Math.max(0, ...Object.values(request.hidden_s));
}

// For those who do not see the bars.
export function inWords(request, shares) {
  const parts = shares
    .filter((share) => Math.abs(request.spent_s[share] ?? 0) >= 0.00005)
    .map((share) => `${name(share)} ${duration(request.spent_s[share])}`);
  return parts.join(", ");
}

export const name = (share) => share.replace("_", " ");

export const lateness = (request) => (request.ttft_s === null ? "none" : duration(request.ttft_s));
