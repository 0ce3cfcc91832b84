// What the server answers, typed, and the one seam between a live server and a report that holds its data itself.
// The server's side of each answer is in src/sonde/show/web/answers/; change both together.

// ------------------------------------------------------------------------------------------------------------ numbers

/** A number in JSON. What JSON lacks is text that `Number()` understands; null is "not there". */
export type Num = number | "NaN" | "Infinity" | "-Infinity" | null;

/** A number of an answer as a number; NaN for what is not there. */
export function num(value: Num | undefined): number {
  return value === null || value === undefined ? NaN : Number(value);
}

// -------------------------------------------------------------------------------------------------------------- types

export type Status = "running" | "finished" | "crashed" | "interrupted" | "broken";
export type Severity = "info" | "warning" | "critical";
export type FindingState = "open" | "acknowledged" | "muted";

export interface Counts {
  critical: number;
  warning: number;
  info: number;
}

/** What the list of runs shows of a run. Worked out in the background; null in a row until it is known. */
export interface Brief {
  /** The last step it was worked out at. */
  last_step: number;
  /** A coarse loss curve: at most 64 points, lowest and highest kept. */
  loss: { name: string; last: Num; steps: number[]; values: Num[] } | null;
  /** Where the loss is going, in the words of `sonde report`; null without a loss. */
  convergence: { tone: "good" | "watch" | "bad" | "unknown"; verdict: string } | null;
  /** 0 to 100 of the run as a whole; null when nothing was measured. */
  health: number | null;
  /** Open findings (neither acknowledged nor muted). */
  findings: Counts;
  /** Share of the time recording took; null when unknown. */
  overhead: number | null;
}

export interface RunRow {
  /** Names the run in every other request and in URLs. Stable over restarts of the server. */
  id: string;
  /** The id in run.json, which `sonde show` understands. */
  run_id: string;
  project: string;
  name: string;
  status: Status;
  /** Why it ended, or why the folder cannot be read (status "broken"). */
  reason: string;
  /** Seconds since 1970. */
  created: number;
  ended: number | null;
  duration_s: number | null;
  last_step: number;
  tags: string[];
  notes: string;
  /** Leaves of the config by dotted path, as JSON text. At most 200. */
  config: Record<string, string>;
  brief: Brief | null;
}

export interface Runs {
  runs: RunRow[];
  /** Deleted runs that can still be brought back. */
  trash: { id: string; project: string; name: string; deleted: number }[];
  /** Briefs that are still being worked out: a `brief` event follows for each. */
  num_pending: number;
  /** Where runs are looked for, for the empty state. Text only. */
  places: string[];
  /** Deleting is off with `sonde ui --read-only`, and for folders that cannot be written to. */
  can_delete: boolean;
}

export interface Overhead {
  fraction: Num;
  uncertainty: Num;
  sentence: string;
}

export interface RunDetail extends RunRow {
  path: string;
  command: string[];
  host: string;
  pid: number;
  world_size: number;
  environment: Record<string, unknown>;
  git: Record<string, unknown> | null;
  /** The whole config as it was given (numbers that are not finite as text). */
  full_config: Record<string, unknown>;
  overhead: Overhead | null;
  /** Sentences on what was asked for and never seen. */
  coverage: string[];
  /** What to know before trusting a picture of this run: damage, dropped rows. */
  warnings: string[];
  first_step: number;
  num_sites: number;
  num_scalars: number;
  num_snapshots: number;
  /** The scalars an overview draws first: names of the loss, learning rate, validation loss where there are such. */
  headline: { loss: number | null; val_loss: number | null; lr: number | null };
}

export interface Site {
  /** Names the series in requests. */
  i: number;
  kind: string;
  name: string;
  shape: number[];
  dtype: string;
  /** The module it belongs to. */
  owner: string;
  module_type: string;
  /** Place in the order of the forward pass; sites of a kind are listed in it. */
  order: number;
  aliases: string[];
}

export interface Stat {
  name: string;
  meaning: string;
  /** How a heat map codes it. */
  scale: "log10" | "linear";
  /** Needs a histogram, which is not taken at every step. */
  needs_hist: boolean;
}

export interface Scalar {
  i: number;
  name: string;
  /** Recorded for the rules (attn/…, rnn/…, unit/…, data/…, model/…), not logged by the user. */
  is_inspection: boolean;
}

/** A module of the model, or a prefix of names. Parents come before children, in the order of the forward pass. */
export interface Module {
  n: number;
  path: string;
  /** The last part of the path. */
  label: string;
  /** `n` of the parent; -1 for the root. */
  parent: number;
  depth: number;
  type: string;
  kind: string;
  order: number;
  /** `i` of the sites that belong to it directly. */
  sites: number[];
}

export interface Sites {
  last_step: number;
  sites: Site[];
  byIndex: Map<number, Site>;
  kinds: string[];
  /** Stats by kind, most useful first. "health" has the one stat "score". */
  stats: Record<string, Stat[]>;
  scalars: Scalar[];
  modules: Module[];
}

/** Several series over one common axis of steps. */
export interface Lines {
  last_step: number;
  from: number;
  to: number;
  /** 0: every recorded step is there. Else so many steps share two points, their lowest and highest in order. */
  steps_per_bucket: number;
  /** Whether a point may stand for the average of several steps (very long runs, very many series). */
  is_merged: boolean;
  steps: Float64Array;
  series: LineSeries[];
}

export interface LineSeries {
  /** Index of the site or scalar; -1 where the series has only a name (health, system). */
  i: number;
  name: string;
  /** Parallel to `steps`; NaN where the series has no point. */
  values: Float64Array;
  /** Steps at which the value itself is NaN or infinite (the first of each bucket). Never left out. */
  nonfinite: Float64Array;
}

/**
 * Rows × columns of u8 codes: 0 nothing there, 1..254 the value from lo to hi, 255 NaN or infinite. A cell holds the
 * highest code of what it stands for, and a higher code is what deserves attention: so rows may be folded, and columns
 * pooled, with max() of the codes, and a single NaN or spike is never hidden.
 */
export interface Heat {
  last_step: number;
  kind: string;
  stat: string;
  scale: "log10" | "linear";
  /** Value of code 1 and of code 254 (their log10 for scale "log10"). For health lo = 100 and hi = 0. */
  lo: number;
  hi: number;
  /** False while columns of merged steps stand in for the highest single step: ask again after `retry_ms`. */
  is_exact: boolean;
  retry_ms: number;
  /** Column c stands for steps first + c * steps_per_column up to, not including, the next column's first. */
  first: number;
  steps_per_column: number;
  num_columns: number;
  num_rows: number;
  /** `i` of the site of each row; -1 for rows of a kind without sites (health). */
  rows: Int32Array;
  /** Names of rows, only for kinds without sites (health: module paths, "" for the run) and for ratios. */
  labels: string[];
  /** num_rows × num_columns, row by row. */
  codes: Uint8Array;
}

/** The value a code of a heat map stands for; NaN for 0, Infinity for 255. */
export function heatValue(heat: { scale: string; lo: number; hi: number }, code: number): number {
  if (code === 0) return NaN;
  if (code === 255) return Infinity;
  const place = heat.lo + ((code - 1) / 253) * (heat.hi - heat.lo);
  return heat.scale === "log10" ? 10 ** place : place;
}

export interface Cell {
  i: number;
  /** The step asked for; -1 when the site was never measured. */
  step: number;
  /** The recorded step at or before the one asked for, whose values these are. */
  recorded_step: number;
  stats: Record<string, Num>;
}

/** 64 bins of binary exponents × columns; column c as in Heat. Counts, summed over the steps of a column. */
export interface Hist {
  last_step: number;
  i: number;
  first: number;
  steps_per_column: number;
  num_columns: number;
  num_bins: number;
  /** Bin b counts values with floor(log2 |x|) == b + min_exponent. */
  min_exponent: number;
  /** num_columns × num_bins, column by column. */
  counts: Float32Array;
  /** Elements of a column (all), zeros among them, NaN or infinite ones. */
  totals: Float64Array;
  zeros: Float64Array;
  nonfinite: Float64Array;
}

export interface Evidence {
  series: string;
  value: Num;
  healthy: string;
  step: number | null;
  meaning: string;
  /** What to draw: a site's stat, or a scalar; null when the series was not recorded. */
  link: { i: number; stat: string } | { scalar: number } | null;
}

export interface Finding {
  n: number;
  /** Stays the same while the finding is the same; states are kept by it. */
  key: string;
  rule: string;
  severity: Severity;
  confidence: number;
  step: number;
  last_step: number;
  sites: string[];
  /** A site of each name to link to, null where none was measured. */
  links: (number | null)[];
  message: string;
  evidence: Evidence[];
  remedy: string;
  references: string[];
  /** `n` of the findings that this one explains. */
  cause_of: number[];
  is_explained: boolean;
  state: FindingState;
}

export interface Findings {
  last_step: number;
  /** "diagnosis": all rules over all that was recorded. "recorded": what was found during training (very long runs). */
  source: "diagnosis" | "recorded";
  findings: Finding[];
  counts: Counts;
  num_rules: number;
  /** Rules that had nothing to look at, and rules that failed. */
  blind: string[];
  failed: string[];
  /** What to record so that more can be checked. */
  gaps: string[];
}

/** `lines.series[0]` is the run as a whole (name ""). */
export interface Health {
  lines: Lines;
  last: number | null;
  /** Newest score of each layer, lowest first. */
  layers: { path: string; score: number }[];
}

export interface RunEvent {
  time: number;
  step: number;
  type: string;
  severity: Severity;
  message: string;
  details: unknown;
}

/** Pressure along depth: three tables of layers × columns, NaN where nothing was measured. */
export interface Flow {
  last_step: number;
  /** What the pressure is of: "grad" (of parameters) or "actgrad" (of activations, where they were recorded). */
  kind: string;
  first: number;
  steps_per_column: number;
  num_columns: number;
  layers: { path: string; type: string; order: number; sites: number[] }[];
  /** num_layers × num_columns each: root mean square, mean |x| (the pressure), largest |x| of the gradient's finite
   *  elements; the largest is Infinity where some were not finite. */
  rms: Float32Array;
  pressure: Float32Array;
  peak: Float32Array;
  /** Root mean square of the layer's activations, and 1 where some of them were not finite. */
  act_rms: Float32Array;
  act_odd: Uint8Array;
  /** Scalars by stat, per module that computes attention / is recurrent; draw them with `scalars`. */
  attention: { path: string; stats: Record<string, number> }[];
  recurrent: { path: string; stats: Record<string, number> }[];
}

export interface SnapshotInfo {
  step: number;
  time: number;
  reason: string;
  nbytes: number;
  num_tensors: number;
}

export interface SnapshotTensor {
  n: number;
  /** "param/layers.3.weight" */
  name: string;
  kind: string;
  site: string;
  shape: number[];
  dtype: string;
  /** The site with statistics of the same name; null when there is none. */
  i: number | null;
}

export interface Snapshots {
  snapshots: SnapshotInfo[];
  /** Why there is nothing to show (the extra is missing, the store is damaged); "" otherwise. */
  problem: string;
}

/** One tensor of a snapshot as an image: each pixel is the element of largest magnitude of its block, sign kept. */
export interface TensorImage {
  step: number;
  n: number;
  name: string;
  shape: number[];
  dtype: string;
  /** The tensor as a matrix: rows × columns, before it was made smaller. */
  matrix: [number, number];
  height: number;
  width: number;
  /** height × width; NaN and infinities as they are. */
  pixels: Float32Array;
  min: Num;
  max: Num;
  rms: Num;
  num_nan: number;
  num_inf: number;
  /** Singular values, largest first; of at most 1,024 evenly chosen rows and columns. Empty for vectors. */
  spectrum: Float64Array;
  spectrum_of: [number, number];
  stable_rank: Num;
}

export interface CompareRow {
  name: string;
  last: Num[];
  min: Num[];
  max: Num[];
  /** `i` of the scalar in each run; null where it was not logged. */
  scalars: (number | null)[];
}

/** Where a run first leaves the first of the list. */
export interface Divergence {
  id: string;
  /** null: no series differs beyond rounding in the steps both have. */
  first: {
    step: number; series: string; a: Num; b: Num;
    /** The batches themselves differ: the two values name them and say nothing else. */
    is_batch: boolean;
    /** What agreed until then, and what may lie behind it. */
    reason: string;
  } | null;
  num_steps: number;
  series: { series: string; step: number; a: Num; b: Num }[];
  only_a: string[];
  only_b: string[];
  /** Why the two could not be compared; "" otherwise. */
  problem: string;
}

export interface Compare {
  runs: RunRow[];
  /** Settings that differ; null where a run does not have it. */
  config: { key: string; values: (string | null)[] }[];
  metrics: CompareRow[];
  /** Which of the metrics is the training loss; null where none is. */
  loss: string | null;
  divergences: Divergence[];
  /** Kinds and stats that all of them have, for the heat map of the ratio. */
  kinds: string[];
}

/** A nudge: something changed; fetch again what is shown. */
export interface Nudge {
  /** "run": a run advanced or ended. "runs": the list changed. "brief": a brief is ready. "findings": new, or dealt with. */
  type: "run" | "runs" | "brief" | "findings";
  run?: string;
  last_step?: number;
  status?: Status;
  reason?: string;
  brief?: Brief;
}

export interface Span {
  /** First and last step, both included; all of the run when left out. */
  from?: number;
  to?: number;
}

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    /** "unauthorized", "not_found", "broken", "bad_request", "busy", "not_in_report", "offline", … */
    readonly code: string,
  ) {
    super(message);
  }
}

// ------------------------------------------------------------------------------------------------------------- source

/** Where answers come from. Views never call fetch: they call the functions below, which ask the source. */
export interface Source {
  readonly kind: "live" | "report";
  get(path: string, signal?: AbortSignal): Promise<ArrayBuffer>;
  send(method: "POST" | "DELETE", path: string, body?: unknown): Promise<ArrayBuffer>;
  /** Calls back on nudges until the returned function is called; `onState` tells whether the line is up. */
  listen(onNudge: (nudge: Nudge) => void, onState?: (isUp: boolean) => void): () => void;
}

class LiveSource implements Source {
  readonly kind = "live";

  async get(path: string, signal?: AbortSignal): Promise<ArrayBuffer> {
    return this.ask(path, { method: "GET", signal: signal ?? null });
  }

  async send(method: "POST" | "DELETE", path: string, body?: unknown): Promise<ArrayBuffer> {
    const headers: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
    return this.ask(path, { method, headers, body: body === undefined ? null : JSON.stringify(body) });
  }

  private async ask(path: string, init: RequestInit): Promise<ArrayBuffer> {
    let response: Response;
    try {
      response = await fetch(path, { ...init, credentials: "same-origin", referrerPolicy: "no-referrer" });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer. Is `sonde ui` still running?", 0, "offline");
    }
    const bytes = await response.arrayBuffer();
    if (!response.ok) throw asError(bytes, response.status);
    return bytes;
  }

  listen(onNudge: (nudge: Nudge) => void, onState?: (isUp: boolean) => void): () => void {
    // Browsers allow six connections to a host: a hidden tab gives its line back, else the seventh tab stalls.
    let line: EventSource | null = null;
    let retry: ReturnType<typeof setTimeout> | undefined;
    let wait_ms = 500;
    const close = () => {
      clearTimeout(retry);
      line?.close();
      line = null;
    };
    const open = () => {
      close();
      if (document.hidden) return;
      line = new EventSource("/api/events");
      line.onopen = () => {
        wait_ms = 500;
        onState?.(true);
        onNudge({ type: "runs" }); // whatever happened while nobody listened
      };
      line.onmessage = (event) => onNudge(JSON.parse(event.data) as Nudge);
      line.onerror = () => {
        onState?.(false);
        close();
        retry = setTimeout(open, wait_ms);
        wait_ms = Math.min(wait_ms * 2, 10_000);
      };
    };
    document.addEventListener("visibilitychange", open);
    open();
    return () => {
      document.removeEventListener("visibilitychange", open);
      close();
    };
  }
}

function asError(bytes: ArrayBuffer, status: number): ApiError {
  try {
    const { error } = JSON.parse(new TextDecoder().decode(bytes)) as { error: { code: string; message: string } };
    return new ApiError(error.message, status, error.code);
  } catch {
    return new ApiError(`The server answered ${status}.`, status, "unknown");
  }
}

/** Parameters that only say how much of an answer is wanted: a report holds one answer for all of them. */
const VIEW_PARAMETERS = ["from", "to", "w", "points", "rows"];

/** The name under which a report keeps an answer: the path without how much is wanted, parameters in order. */
export function reportKey(path: string): string {
  const [where, query = ""] = path.split("?");
  const kept = query.split("&").filter((part) => part && !VIEW_PARAMETERS.includes(part.split("=")[0]!));
  return kept.length ? `${where}?${kept.sort().join("&")}` : where!;
}

/** Answers that are in the page itself: <script type="application/octet-stream" id="sonde-data">base64 of gzip</script> */
class ReportSource implements Source {
  readonly kind = "report";
  private answers: Promise<Map<string, ArrayBuffer>>;

  constructor(text: string) {
    this.answers = unpack(text);
  }

  async get(path: string): Promise<ArrayBuffer> {
    const found = (await this.answers).get(reportKey(path));
    if (!found) throw new ApiError("This is not part of the report. Open the run with `sonde ui`.", 404, "not_in_report");
    return found;
  }

  async send(): Promise<ArrayBuffer> {
    throw new ApiError("A report cannot be changed. Open the run with `sonde ui`.", 405, "not_in_report");
  }

  listen(): () => void {
    return () => undefined;
  }
}

async function unpack(text: string): Promise<Map<string, ArrayBuffer>> {
  const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { header, body } = split(await new Response(stream).arrayBuffer());
  const entries = header["answers"] as [string, number, number][];
  return new Map(entries.map(([key, offset, length]) => [key, body.slice(offset, offset + length)]));
}

function pickSource(): Source {
  const inlined = typeof document === "undefined" ? null : document.getElementById("sonde-data");
  return inlined?.textContent ? new ReportSource(inlined.textContent) : new LiveSource();
}

export const source: Source = pickSource();

// ------------------------------------------------------------------------------------------------------------- decode

type Header = Record<string, unknown>;
type Buffers = Record<string, Float64Array | Float32Array | Int32Array | Uint8Array>;
const ARRAYS = { f64: Float64Array, f32: Float32Array, i32: Int32Array, u8: Uint8Array } as const;

/** "SNB1", u32 length of the header, header (JSON, padded to 8), body. Little-endian. */
function split(bytes: ArrayBuffer): { header: Header; body: ArrayBuffer } {
  const view = new DataView(bytes);
  if (bytes.byteLength < 8 || view.getUint32(0, true) !== 0x31424e53) throw new ApiError("Not an answer.", 0, "bad_answer");
  const end = 8 + view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, end - 8))) as Header;
  return { header, body: bytes.slice(end) };
}

/** A binary answer: its header and its named arrays. */
export function decode(bytes: ArrayBuffer): { header: Header; buffers: Buffers } {
  const { header, body } = split(bytes);
  const buffers: Buffers = {};
  for (const [name, dtype, offset, length] of header["buffers"] as [string, keyof typeof ARRAYS, number, number][]) {
    buffers[name] = new ARRAYS[dtype](body, offset, length);
  }
  return { header, buffers };
}

async function json<T>(path: string, signal?: AbortSignal): Promise<T> {
  return JSON.parse(new TextDecoder().decode(await source.get(path, signal))) as T;
}

function query(parameters: Record<string, string | number | readonly number[] | undefined>): string {
  const parts = Object.entries(parameters)
    .filter(([, value]) => value !== undefined)
    .map(([key, value]) => `${key}=${encodeURIComponent(Array.isArray(value) ? value.join(",") : String(value))}`);
  return parts.length ? `?${parts.join("&").replaceAll("%2C", ",")}` : "";
}

function decodeLines(bytes: ArrayBuffer): Lines {
  const { header, buffers } = decode(bytes);
  const steps = buffers["steps"] as Float64Array;
  const values = buffers["values"] as Float64Array;
  const odd = buffers["nonfinite"] as Float64Array;
  let at = 0;
  const series = (header["series"] as { i: number; name: string; num_nonfinite: number }[]).map((entry, n) => ({
    i: entry.i,
    name: entry.name,
    values: values.subarray(n * steps.length, (n + 1) * steps.length),
    nonfinite: odd.subarray(at, (at += entry.num_nonfinite)),
  }));
  return { ...(header as unknown as Lines), steps, series };
}

/** Lines of several answers over one axis: what a report, which keeps each series alone, makes of many. */
export function joinLines(all: Lines[]): Lines {
  if (all.length === 1) return all[0]!;
  const steps = Float64Array.from(new Set(all.flatMap((lines) => Array.from(lines.steps)))).sort();
  const place = new Map(Array.from(steps, (step, n) => [step, n]));
  const series = all.flatMap((lines) =>
    lines.series.map((one) => {
      const values = new Float64Array(steps.length).fill(NaN);
      lines.steps.forEach((step, n) => (values[place.get(step)!] = one.values[n]!));
      return { ...one, values };
    }),
  );
  return {
    last_step: Math.max(-1, ...all.map((lines) => lines.last_step)),
    from: Math.min(...all.map((lines) => lines.from)),
    to: Math.max(...all.map((lines) => lines.to)),
    steps_per_bucket: Math.max(0, ...all.map((lines) => lines.steps_per_bucket)),
    is_merged: all.some((lines) => lines.is_merged),
    steps,
    series,
  };
}

async function manyLines(
  path: string,
  which: readonly number[],
  rest: Record<string, string | number | undefined>,
  signal?: AbortSignal,
): Promise<Lines> {
  if (source.kind === "live" || which.length === 1) {
    return decodeLines(await source.get(path + query({ i: which, ...rest }), signal));
  }
  return joinLines(await Promise.all(which.map((i) => manyLines(path, [i], rest, signal))));
}

// ------------------------------------------------------------------------------------------------------------ answers

/**
 * Exchange the token in the fragment (`#token=…`) for a cookie and take it out of the address bar. True when there was
 * one. Call once before anything else; afterwards an ApiError "unauthorized" means: show how to get a new link.
 */
export async function login(): Promise<boolean> {
  if (source.kind !== "live") return false;
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return false;
  history.replaceState(history.state, "", location.pathname + location.search);
  await source.send("POST", "/api/login", { token });
  return true;
}

export const listen = (onNudge: (nudge: Nudge) => void, onState?: (isUp: boolean) => void): (() => void) =>
  source.listen(onNudge, onState);

export const getRuns = (signal?: AbortSignal): Promise<Runs> => json("/api/runs", signal);

export const getRun = (id: string, signal?: AbortSignal): Promise<RunDetail> => json(`/api/runs/${id}`, signal);

/** Sites, scalars, stats and the tree of modules. Ask again when last_step went from -1, or an index is unknown. */
export async function getSites(id: string, signal?: AbortSignal): Promise<Sites> {
  interface Columns {
    i: number[];
    kind: number[];
    name: string[];
    shape: number[][];
    dtype: number[];
    owner: string[];
    module_type: number[];
    order: number[];
    aliases: Record<string, string[]>;
  }
  type Wire = Omit<Sites, "sites" | "byIndex"> & { columns: Columns; dtypes: string[]; types: string[] };
  const { columns, dtypes, types, ...rest } = await json<Wire>(`/api/runs/${id}/sites`, signal);
  const sites = columns.i.map((i, n) => ({
    i,
    kind: rest.kinds[columns.kind[n]!]!,
    name: columns.name[n]!,
    shape: columns.shape[n]!,
    dtype: dtypes[columns.dtype[n]!]!,
    owner: columns.owner[n]!,
    module_type: types[columns.module_type[n]!]!,
    order: columns.order[n]!,
    aliases: columns.aliases[i] ?? [],
  }));
  return { ...rest, sites, byIndex: new Map(sites.map((site) => [site.i, site])) };
}

/** Logged numbers. At most 64 series at once, `points` up to 4,000. */
export const getScalars = (
  id: string,
  which: readonly number[],
  options: Span & { points?: number } = {},
  signal?: AbortSignal,
): Promise<Lines> => manyLines(`/api/runs/${id}/scalars`, which, { ...options }, signal);

/** One stat of several sites. At most 64 series at once. */
export const getLines = (
  id: string,
  which: readonly number[],
  stat: string,
  options: Span & { points?: number } = {},
  signal?: AbortSignal,
): Promise<Lines> => manyLines(`/api/runs/${id}/lines`, which, { stat, ...options }, signal);

function decodeHeat(bytes: ArrayBuffer): Heat {
  const { header, buffers } = decode(bytes);
  return {
    ...(header as unknown as Heat),
    rows: buffers["rows"] as Int32Array,
    codes: buffers["codes"] as Uint8Array,
  };
}

/**
 * The heat map of a kind, all its sites in the order of the forward pass, about `w` columns (up to 4,096). `rows` is a
 * range of positions in that order ("0-499"), for zooming into very many rows.
 */
export const getHeat = async (
  id: string,
  kind: string,
  stat: string,
  options: Span & { w?: number; rows?: string } = {},
  signal?: AbortSignal,
): Promise<Heat> => decodeHeat(await source.get(`/api/runs/${id}/heat` + query({ kind, stat, ...options }), signal));

/** Every stat of a site at a step, exactly. */
export const getCell = (id: string, i: number, step: number, signal?: AbortSignal): Promise<Cell> =>
  json(`/api/runs/${id}/cell` + query({ i, step }), signal);

export async function getHist(
  id: string,
  i: number,
  options: Span & { w?: number } = {},
  signal?: AbortSignal,
): Promise<Hist> {
  const { header, buffers } = decode(await source.get(`/api/runs/${id}/hist` + query({ i, ...options }), signal));
  return { ...header, ...buffers } as unknown as Hist;
}

export const getFindings = (id: string, signal?: AbortSignal): Promise<Findings> =>
  json(`/api/runs/${id}/findings`, signal);

export async function setFindingState(id: string, finding: Finding, state: FindingState): Promise<void> {
  await source.send("POST", `/api/runs/${id}/findings/${finding.n}/state`, { state, key: finding.key });
}

export async function getHealth(id: string, options: { points?: number } = {}, signal?: AbortSignal): Promise<Health> {
  const bytes = await source.get(`/api/runs/${id}/health` + query(options), signal);
  const { header } = decode(bytes);
  return { ...(header as unknown as Health), lines: decodeLines(bytes) };
}

/** Readings of the machine, by step, and "throughput (steps/s)" worked out from the times of logged numbers. */
export const getSystem = async (id: string, options: { points?: number } = {}, signal?: AbortSignal): Promise<Lines> =>
  decodeLines(await source.get(`/api/runs/${id}/system` + query(options), signal));

export const getEvents = async (id: string, signal?: AbortSignal): Promise<RunEvent[]> =>
  (await json<{ events: RunEvent[] }>(`/api/runs/${id}/events`, signal)).events;

export async function getFlow(id: string, options: Span & { w?: number } = {}, signal?: AbortSignal): Promise<Flow> {
  const { header, buffers } = decode(await source.get(`/api/runs/${id}/flow` + query({ ...options }), signal));
  return { ...header, ...buffers } as unknown as Flow;
}

export const getSnapshots = (id: string, signal?: AbortSignal): Promise<Snapshots> =>
  json(`/api/runs/${id}/snapshots`, signal);

export const getSnapshot = async (id: string, step: number, signal?: AbortSignal): Promise<SnapshotTensor[]> =>
  (await json<{ tensors: SnapshotTensor[] }>(`/api/runs/${id}/snapshots/${step}`, signal)).tensors;

export async function getTensorImage(id: string, step: number, n: number, signal?: AbortSignal): Promise<TensorImage> {
  const { header, buffers } = decode(await source.get(`/api/runs/${id}/snapshots/${step}/${n}`, signal));
  return { ...header, ...buffers } as unknown as TensorImage;
}

/** Two to eight runs; the first is what the others are compared with. */
export const getCompare = (ids: readonly string[], signal?: AbortSignal): Promise<Compare> =>
  json(`/api/compare?ids=${ids.join(",")}`, signal);

/**
 * The heat map of b over a, sites that both have, as log10 of the ratio: codes 1..254 from lo = -hi to hi, 127.5 is equal.
 * A cell is the ratio of the highest values of its steps. Fold rows by distance from 127.5, not with max().
 */
export const getRatio = async (
  a: string,
  b: string,
  kind: string,
  stat: string,
  options: Span & { w?: number } = {},
  signal?: AbortSignal,
): Promise<Heat> => decodeHeat(await source.get("/api/compare/heat" + query({ a, b, kind, stat, ...options }), signal));

/** To the trash of the folder of runs; `restoreRun` brings it back. A running run is refused. */
export async function deleteRun(id: string): Promise<void> {
  await source.send("DELETE", `/api/runs/${id}`);
}

export async function restoreRun(id: string): Promise<void> {
  await source.send("POST", `/api/runs/${id}/restore`);
}
