// The mesh around the requests: caches, idle engines, queues, configurations, members.

import { byId, h, placed, show } from "./dom.js";
import { clock, count, duration, percent } from "./format.js";
import { name } from "./ledger.js";

export function showCache(state) {
  show(byId("cache"), state.cache, ({ tiers, predicted, prompt_tokens: total, stores }) => {
    if (!total) return none("No prompt came in the last 5 minutes.");
    const off = predicted.num_requests
      ? `Routers expected ${percent(predicted.predicted_tokens / predicted.prompt_tokens)} to be cached, and ${percent(predicted.cached_tokens / predicted.prompt_tokens)} was: ` +
        `${count(predicted.over_tokens)} tokens were expected in vain, ${count(predicted.under_tokens)} were a surprise.`
      : "Routers expected nothing: the strategy does not ask what is cached.";
    return [
      bars(
        tiers
          .filter(({ tokens }) => tokens > 0)
          .map(({ tier, share, tokens }) => [tier, share, `${percent(share)} · ${count(tokens)}`]),
      ),
      note(off),
      ...stores.map(({ tier, num_hits: hits, hit_rate: hit }) =>
        note(`${tier} had ${percent(hit)} of the blocks it was asked for (${count(hits)}).`),
      ),
    ];
  });
}

export function showBubbles(state) {
  show(byId("bubbles"), state.bubbles, ({ stages }) => {
    if (stages.length === 0) return none("None: whenever there was work, engines did it.");
    const longest = Math.max(...stages.map(({ share }) => share), 1e-9);
    return [
      bars(
        stages.map(({ stage, share, duration_s: lost }) => [
          name(stage),
          share / longest,
          `${duration(lost)} · ${percent(share)}`,
        ]),
      ),
      note(
        "By the stage that held the work, and as a share of the engines' time in the last 5 minutes.",
      ),
    ];
  });
}

export function showQueues(state) {
  show(byId("queues"), state.queues, (queues) => {
    if (queues.length === 0) return none("Nobody stood in line.");
    const heads = ["class", "requests", "in line", "P50", "P95"];
    return h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((title) => h("th", { scope: "col" }, title)),
        ),
      ),
      h(
        "tbody",
        {},
        queues.map((queue) =>
          h(
            "tr",
            {},
            h("td", {}, queue.request_class || "–"),
            h(
              "td",
              {},
              count(queue.num_requests),
              queue.num_failed
                ? h("div", { class: "bad" }, `${count(queue.num_failed)} failed`)
                : null,
            ),
            h(
              "td",
              {},
              queue.num_waiting ?? "–",
              queue.longest ? h("div", { class: "faint" }, `up to ${count(queue.longest)}`) : null,
            ),
            h("td", {}, duration(queue.p50_s)),
            h("td", {}, duration(queue.p95_s)),
          ),
        ),
      ),
    );
  });
}

export function showGenerations(state, effects) {
  const rows = state.generations.map((generation) => [generation, effects[generation.number]]);
  show(byId("generations"), rows, () => {
    if (rows.length === 0) return none("It has not changed.");
    const newest = [...rows].reverse();
    return h("table", { class: "wide" }, h("tbody", {}, newest.map(generationRow)));
  });
}

function generationRow([{ number, since_unix_s: since, changes }, effect]) {
  const changed = changes.map(([key, before, after]) =>
    h("div", {}, h("code", {}, `${key}: ${before} → ${after}`)),
  );
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, `g${number} ${clock(since)}`),
    h("td", {}, changed.length ? changed : "as it was at the start", effectOf(effect)),
  );
}

function effectOf(effect) {
  if (!effect?.requests) return null;
  const { requests, ttft_p50_ms: p50, hit_rate: hit, effect: compared } = effect;
  const figures = [
    `${count(requests)} requests`,
    p50 === null ? "" : `P50 ${duration(p50 / 1e3)}`,
    hit === null ? "" : `${percent(hit)} from a cache`,
  ];
  const against = compared ? `. Against g${compared.against}: ${compared.verdict}` : "";
  return h("div", { class: "faint" }, `${figures.filter(Boolean).join(", ")}${against}.`);
}

export function showMembers(state) {
  show(byId("members"), [state.members, state.generation], () => {
    if (state.members.length === 0) return none("Nobody is there.");
    const left = state.num_members_left_out;
    return [
      h(
        "ul",
        {},
        state.members.map((member) => memberRow(member, state.generation)),
      ),
      left ? note(`${left} more that are ready are not shown.`) : null,
    ];
  });
}

function memberRow(member, newest) {
  const known = ["ready", "starting", "draining"].includes(member.state) ? member.state : "odd";
  const load = member.load.map(({ name: what, unit, value }) => `${figure(value, unit)} ${what}`);
  const behind = member.generation < newest ? `configuration ${member.generation}` : "";
  return h(
    "li",
    { class: `member ${known}` },
    h(
      "p",
      { class: "name" },
      h("span", {}, member.id),
      h("span", { class: "state" }, member.state),
    ),
    h(
      "p",
      { class: "load" },
      [...load, behind, member.detail].filter(Boolean).join(" · ") || member.address,
    ),
  );
}

function figure(value, unit) {
  if (unit === "share") return percent(value);
  if (unit === "second") return duration(value);
  if (unit === "byte") return `${count(value / 1e6)}\u00a0MB`;
  return count(value);
}

function bars(rows) {
  return h(
    "div",
    { class: "bars" },
    rows.flatMap(([title, share, text]) => [
      h("span", {}, title),
      h("span", { class: "track", "aria-hidden": "true" }, placed(h("span"), 0, share)),
      h("span", { class: "number" }, text),
    ]),
  );
}

const none = (text) => h("p", { class: "none" }, text);
const note = (text) => h("p", { class: "note" }, text);
