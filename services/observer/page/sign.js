import { svg } from "./dom.js";

// A shape for each level: colour alone says nothing to many.
export function sign(level) {
  const shapes = {
    healthy: "M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zM4.5 8.2l2.3 2.3 4.7-4.9",
    warning: "M8 1.5 15.2 14.5H.8zM8 6v4M8 12v.6",
    critical: "M5 1h6l4 4v6l-4 4H5l-4-4V5zM5.5 5.5l5 5M10.5 5.5l-5 5",
    idle: "M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1z",
  };
  return svg(
    "svg",
    { viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("path", {
      d: shapes[level] ?? shapes.warning,
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "1.6",
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}
