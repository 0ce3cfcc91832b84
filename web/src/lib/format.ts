// Formatting of numbers, durations and times for display.

const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

function superscript(exponent: number): string {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPT[Number(digit)]).join("");
  return (exponent < 0 ? "⁻" : "") + digits;
}

function trimmed(text: string): string {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function minus(text: string): string {
  return text.replace("-", "−");
}

/** `0.00001234` → `1.234×10⁻⁵`; `12345` → `12,345`. Only zero is written as "0". */
export function number(value: number | null | undefined, figures = 4): string {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa = "", exponent = "0"] = value.toExponential(figures - 1).split("e");
    const rounded = trimmed(mantissa);
    const power = `10${superscript(Number(exponent))}`;
    if (rounded === "1") return power;
    return minus(rounded === "-1" ? `-${power}` : `${rounded}×${power}`);
  }
  if (Number.isInteger(value)) return minus(value.toLocaleString("en-US"));
  if (size >= 10 ** figures) return minus(Math.round(value).toLocaleString("en-US"));
  return minus(trimmed(value.toPrecision(figures)));
}

/** The value with nine significant digits, for tooltips and tables. */
export function exact(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return number(value);
  return minus(Number(value.toPrecision(9)).toString());
}

export function integer(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

/** `1234567` → `1.2 M`. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return number(value);
  return withPrefix(value, 1000, ["", "k", "M", "G", "T"]);
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return number(value);
  return withPrefix(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

function withPrefix(value: number, base: number, prefixes: string[]): string {
  let power = 0;
  let left = value;
  while (Math.abs(left) >= base && power < prefixes.length - 1) {
    left /= base;
    power += 1;
  }
  const figures = power === 0 ? 4 : Math.abs(left) >= 100 ? 3 : Math.abs(left) >= 10 ? 3 : 2;
  return `${minus(trimmed(left.toPrecision(figures)))} ${prefixes[power]}`.trim();
}

export function percent(fraction: number | null | undefined, figures = 2): string {
  if (fraction === null || fraction === undefined || !Number.isFinite(fraction)) return number(fraction);
  return `${minus(trimmed((fraction * 100).toPrecision(figures + (Math.abs(fraction) >= 1 ? 1 : 0))))} %`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${number(seconds * 1000, 3)} ms`;
  if (seconds < 60) return `${number(seconds, 3)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** `3 min ago`, relative to `now_s`, so that a list uses one clock. */
export function ago(time_s: number | null | undefined, now_s: number): string {
  if (!time_s) return "–";
  const passed = now_s - time_s;
  if (passed < 5) return "just now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} d ago`;
}

export function moment(time_s: number | null | undefined): string {
  return time_s ? new Date(time_s * 1000).toLocaleString() : "–";
}

/** "1 step", "2 steps". */
export const counted = (count: number, noun: string): string => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;
