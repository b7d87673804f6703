// Numbers for people. Units are joined by a space that does not break.

const GAP = "\u00a0";

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size < 0.00995) return `${(seconds * 1e3).toFixed(size < 0.00005 ? 0 : 1)}${GAP}ms`;
  if (size < 0.9995) return `${(seconds * 1e3).toFixed(0)}${GAP}ms`;
  if (size < 9.995) return `${seconds.toFixed(2)}${GAP}s`;
  if (size < 99.95) return `${seconds.toFixed(1)}${GAP}s`;
  if (size < 3540) return `${(seconds / 60).toFixed(0)}${GAP}min`;
  return `${(seconds / 3600).toFixed(0)}${GAP}h`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = share * 100;
  return `${value.toFixed(value > 0 && value < 9.95 ? 1 : 0)}${GAP}%`;
}

export function count(value) {
  if (value < 1e4) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(1)}M`;
}

// How much more or less, once it is more than a few percent and of a size that matters.
export function change(now, before, smallest) {
  if (now === null || before === null || now === undefined || before === undefined) return "";
  if (Math.abs(now - before) < smallest) return "same";
  if (before <= 0) return "new";
  const ratio = now / before;
  if (ratio >= 3) return `×${ratio.toFixed(ratio < 9.95 ? 1 : 0)}`;
  const rounded = Math.round((ratio - 1) * 100);
  return rounded === 0 ? "same" : `${rounded > 0 ? "+" : "−"}${Math.abs(rounded)}${GAP}%`;
}

export function points(now, before) {
  if (now === null || before === null) return "";
  const rounded = Math.round((now - before) * 100);
  if (rounded === 0) return "same";
  return `${rounded > 0 ? "+" : "−"}${Math.abs(rounded)} pts`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const SECONDS = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});

export const clock = (unix) => CLOCK.format(unix * 1000);
export const clockSeconds = (unix) => SECONDS.format(unix * 1000);

// A figure and its unit in a sentence stay together.
export const tight = (text) => text.replace(/(\d) (?=(%|ms|s|min|h)\b|%)/g, `$1${GAP}`);

// As a rate for whoever counts requests: each second, or each minute where there are few.
export function rate(number, seconds) {
  const each = number / seconds;
  if (each * 60 < 1) return `${number} in ${duration(seconds)}`;
  if (each >= 1) return `${count(each)}/s`;
  return `${(each * 60).toFixed(each * 60 < 10 ? 1 : 0)}/min`;
}
