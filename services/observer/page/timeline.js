// The stacked chart: for each step of time, what the time to the first token went for.

import { svg } from "./dom.js";
import { clock, clockSeconds, duration } from "./format.js";

const LEFT = 54;
const TOP = 18;
const BOTTOM = 22;

export class Timeline {
  // `onCursor(step)` hears which step is looked at; null: none, so what is now.
  constructor(element, onCursor) {
    this.element = element;
    this.onCursor = onCursor;
    this.cursor = null;
    element.addEventListener("pointermove", (event) => this.point(event));
    element.addEventListener("pointerdown", (event) => this.point(event));
    element.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.look(null);
    });
    element.addEventListener("blur", () => this.look(null));
    element.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(element);
  }

  show(timeline, shares, field, generations) {
    this.cursor = this.moved(timeline);
    Object.assign(this, { timeline, shares, field, generations });
    this.draw();
  }

  // What is looked at stays, while the steps move on; null once it is gone.
  moved({ begin_unix_s: begin, step_s: stepSeconds }) {
    if (this.cursor === null || this.timeline.step_s !== stepSeconds) return null;
    const step = this.cursor - Math.round((begin - this.timeline.begin_unix_s) / stepSeconds);
    return step >= 0 ? step : null;
  }

  get numSteps() {
    return this.timeline.num_requests.length;
  }

  draw() {
    const { width, height } = this.element.getBoundingClientRect();
    if (!this.timeline || width === 0) return;
    const sums = this.sums();
    const top = ceiling(Math.max(...sums, 0));
    this.area = { width: width - LEFT, height: height - TOP - BOTTOM, top };
    this.element.replaceChildren(
      svg(
        "svg",
        { width, height, "aria-hidden": "true", focusable: "false" },
        this.axis(),
        this.cursorMark(),
        this.stack(),
        this.failures(),
        this.marks(),
        sums.some((sum) => sum > 0)
          ? null
          : svg("text", { x: LEFT + 8, y: TOP + 20 }, "No first token in this time."),
      ),
    );
    this.say(sums);
  }

  sums() {
    const columns = this.shares.map((share) => this.timeline[this.field][share]);
    return this.timeline.num_requests.map((_, step) =>
      columns.reduce((sum, column) => sum + Math.max(column[step] ?? 0, 0), 0),
    );
  }

  x(step) {
    return LEFT + (this.area.width * step) / this.numSteps;
  }

  y(seconds) {
    return TOP + this.area.height * (1 - seconds / this.area.top);
  }

  axis() {
    const parts = [0, 0.5, 1].map((share) => {
      const seconds = this.area.top * share;
      const y = Math.round(this.y(seconds)) + 0.5;
      return [
        svg("line", { class: "grid", x1: LEFT, x2: LEFT + this.area.width, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, round(seconds)),
      ];
    });
    const { begin_unix_s: begin, step_s: stepSeconds } = this.timeline;
    const every = stepSeconds * (this.area.width < 420 ? 24 : 12);
    const end = begin + this.numSteps * stepSeconds;
    for (let unix = Math.ceil(begin / every) * every; unix <= end; unix += every) {
      const x = this.x((unix - begin) / stepSeconds);
      const anchor = x < LEFT + 20 ? "start" : x > LEFT + this.area.width - 20 ? "end" : "middle";
      parts.push(
        svg("text", { x, y: TOP + this.area.height + 16, "text-anchor": anchor }, clock(unix)),
      );
    }
    return parts.flat();
  }

  // One path a share: hundreds of rectangles would be as many elements.
  stack() {
    const bottoms = this.timeline.num_requests.map(() => 0);
    const wide = Math.max(this.area.width / this.numSteps - 1, 1);
    return this.shares.map((share) => {
      const column = this.timeline[this.field][share];
      let path = "";
      column.forEach((value, step) => {
        if (!(value > 0)) return;
        const bottom = this.y(bottoms[step]);
        bottoms[step] += value;
        const high = bottom - this.y(bottoms[step]);
        path += `M${this.x(step).toFixed(1)} ${bottom.toFixed(2)}h${wide.toFixed(1)}v${(-high).toFixed(2)}h${(-wide).toFixed(1)}z`;
      });
      return svg("path", { class: share, d: path });
    });
  }

  // A red foot below steps in which requests failed.
  failures() {
    const wide = Math.max(this.area.width / this.numSteps - 1, 2);
    return this.timeline.num_failed.map((number, step) =>
      number > 0
        ? svg("rect", {
            class: "failed",
            x: this.x(step),
            y: TOP + this.area.height + 1,
            width: wide,
            height: 3,
          })
        : null,
    );
  }

  marks() {
    const { begin_unix_s: begin, step_s: stepSeconds } = this.timeline;
    let free = -Infinity;
    return this.generations.flatMap(({ number, since_unix_s: since }) => {
      const step = (since - begin) / stepSeconds;
      if (step < 0 || step > this.numSteps) return [];
      const x = Math.round(this.x(step)) + 0.5;
      const name = `g${number}`;
      const mark = [
        svg("line", { class: "generation", x1: x, x2: x, y1: TOP, y2: TOP + this.area.height }),
      ];
      if (x > free) {
        const isLate = step > this.numSteps * 0.9;
        mark.push(
          svg(
            "text",
            {
              class: "generation-name",
              x,
              y: TOP - 5,
              "text-anchor": isLate ? "end" : "start",
            },
            name,
          ),
        );
        free = x + 10 + name.length * 8;
      }
      return mark;
    });
  }

  cursorMark() {
    if (this.cursor === null) return null;
    const wide = this.area.width / this.numSteps;
    return svg("rect", {
      class: "cursor",
      x: this.x(this.cursor),
      y: TOP,
      width: wide,
      height: this.area.height,
    });
  }

  point(event) {
    if (!this.area) return;
    const from = this.element.getBoundingClientRect().left + LEFT;
    const step = Math.floor(((event.clientX - from) / this.area.width) * this.numSteps);
    this.look(step >= 0 && step < this.numSteps ? step : null);
  }

  press(event) {
    if (!this.timeline) return;
    const last = this.numSteps - 1;
    const at = this.cursor ?? last + 1;
    const to = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageDown: at - 10,
      PageUp: at + 10,
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape") this.look(null);
    if (to === undefined) return;
    event.preventDefault();
    this.look(Math.min(Math.max(to, 0), last));
  }

  look(step) {
    if (step === this.cursor) return;
    this.cursor = step;
    this.draw();
    this.onCursor(step);
  }

  say(sums) {
    const step = this.cursor ?? this.numSteps - 1;
    const when = clockSeconds(this.timeline.begin_unix_s + step * this.timeline.step_s);
    const of = this.shares
      .filter((share) => this.timeline[this.field][share][step] > 0)
      .map(
        (share) => `${share.replace("_", " ")} ${duration(this.timeline[this.field][share][step])}`,
      );
    const told = of.length ? `${duration(sums[step])}: ${of.join(", ")}` : "no first token";
    this.element.setAttribute("aria-valuemax", String(this.numSteps - 1));
    this.element.setAttribute("aria-valuenow", String(step));
    this.element.setAttribute("aria-valuetext", `${when}, ${told}`);
  }
}

// "2 s" rather than "2.00 s".
function round(seconds) {
  if (seconds === 0) return "0";
  return duration(seconds)
    .replace(/(\.\d*?)0+(?=\u00a0)/, "$1")
    .replace(/\.(?=\u00a0)/, "");
}

// A round number above, for the axis.
function ceiling(seconds) {
  if (seconds <= 0) return 0.01;
  const power = 10 ** Math.floor(Math.log10(seconds));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= seconds) * power;
}

// A step line; what is missing leaves a gap. Its own scale: it shows when, not how much.
export function spark(values) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, 1e-9);
  let path = "";
  values.forEach((value, step) => {
    if (value === null) return;
    const y = (19 - 18 * (value / top)).toFixed(2);
    path += values[step - 1] === null || step === 0 ? `M${step} ${y}` : `V${y}`;
    path += `H${step + 1}`;
  });
  return svg(
    "svg",
    {
      class: "spark",
      viewBox: `0 0 ${values.length} 20`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    svg("path", { d: path }),
  );
}
