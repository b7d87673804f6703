// Asks the observer every two seconds what to show, and says so when it does not answer.

import { byId } from "./dom.js";
import { clockSeconds } from "./format.js";
import { showFindings } from "./findings.js";
import { showBubbles, showCache, showGenerations, showMembers, showQueues } from "./mesh.js";
import { showSlow } from "./slow.js";
import { Timeline } from "./timeline.js";
import { Trace } from "./trace.js";
import { showFigures, showShares, showVerdict } from "./verdict.js";

const INTERVAL_MS = 2000;
const LONGEST_INTERVAL_MS = 10000;
const EFFECTS_INTERVAL_MS = 20000;
// Where the mesh is too busy, so is the observer.
const TIMEOUT_MS = 10000;

const SHARES = [
  "queue",
  "preprocess",
  "route",
  "prefill_queue",
  "kv_load",
  "prefill",
  "transfer",
  "residual",
];

const timeline = new Timeline(byId("chart"), () => showShares(page.state, looked()));
const trace = new Trace(SHARES);
const open = (id, span) => trace.open(id, span);
const page = {
  state: null,
  // By generation.
  effects: {},
  effectsDue: 0,
  range: 0,
  field: "mean_s",
  failures: 0,
  timer: 0,
};

function draw() {
  const { state } = page;
  const chosen = state.timelines[page.range];
  showVerdict(state);
  showFigures(state, chosen);
  timeline.show(chosen, state.shares, page.field, state.generations);
  showShares(state, looked());
  showFindings(state, open);
  showSlow(state, open);
  showCache(state);
  showBubbles(state);
  showQueues(state);
  showGenerations(state, page.effects);
  showMembers(state);
}

// What the table beside the chart is about: a step of it, or the last five minutes.
function looked() {
  const { state, field } = page;
  const { cursor } = timeline;
  if (cursor === null || cursor >= timeline.numSteps) return { field, when: "now", column: null };
  const chosen = state.timelines[page.range];
  const column = Object.fromEntries(
    state.shares.map((share) => [share, chosen[field][share][cursor]]),
  );
  const when = clockSeconds(chosen.begin_unix_s + cursor * chosen.step_s);
  return { field, when, column };
}

async function ask(path) {
  const response = await fetch(path, {
    cache: "no-store",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!response.ok) throw new Error(`The observer answers ${response.status}`);
  return response.json();
}

// What each change of the configuration did. It changes slowly.
async function learnEffects() {
  if (page.state.generations.length < 2 || Date.now() < page.effectsDue) return;
  page.effectsDue = Date.now() + EFFECTS_INTERVAL_MS;
  const { generations } = await ask("api/effects");
  page.effects = Object.fromEntries(generations.map((each) => [each.generation, each]));
}

async function refresh() {
  clearTimeout(page.timer);
  if (document.hidden) return;
  try {
    page.state = await ask("api/state");
    await learnEffects();
    page.failures = 0;
    connected();
    draw();
    document.body.dataset.ready = "";
  } catch (error) {
    page.failures += 1;
    lost(error);
  }
  const wait = Math.min(INTERVAL_MS * 2 ** Math.max(page.failures - 1, 0), LONGEST_INTERVAL_MS);
  clearTimeout(page.timer);
  page.timer = setTimeout(refresh, wait);
}

function connected() {
  delete document.body.dataset.stale;
  byId("lost").hidden = true;
  byId("link").dataset.link = "live";
  byId("link").textContent = `live ${clockSeconds(page.state.now_unix_s)}`;
}

// One miss is a hiccup; the second is said.
function lost(error) {
  if (page.failures < 2) return;
  const isHttp = error.message.startsWith("The observer answers");
  const since = page.state ? ` What you see is from ${clockSeconds(page.state.now_unix_s)}.` : "";
  byId("lost").textContent =
    `${isHttp ? error.message : "No connection to the observer"}.${since} Trying again.`;
  byId("lost").hidden = false;
  document.body.dataset.stale = "";
  byId("link").dataset.link = "lost";
  byId("link").textContent = "lost";
}

function choice(id, choose) {
  const buttons = [...byId(id).querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      choose(button.dataset.value);
      if (page.state) draw();
    });
  }
}

choice("range", (value) => {
  page.range = Number(value);
});
choice("whose", (value) => {
  page.field = value;
});
document.addEventListener("visibilitychange", refresh);
window.addEventListener("online", refresh);
trace.follow();
refresh();
