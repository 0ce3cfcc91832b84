// Typed access to the server's API, and to a report that contains its own data.
// The Python side of each response is in src/sonde/show/web/answers/; change both together.

// ------------------------------------------------------------------------------------------------------------ numbers

/** A number in JSON. NaN and infinities are strings that `Number()` understands; null means missing. */
export type Num = number | "NaN" | "Infinity" | "-Infinity" | null;

/** Convert a JSON number; a missing value becomes NaN. */
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

/** Summary of a run for the list of runs. Computed in the background; null in a row until it is ready. */
export interface Brief {
  /** Last step it covers. */
  last_step: number;
  /** A coarse loss curve: at most 64 points, keeping minima and maxima. */
  loss: { name: string; last: Num; steps: number[]; values: Num[] } | null;
  /** Convergence verdict, worded as in `sonde report`; null without a loss. */
  convergence: { tone: "good" | "watch" | "bad" | "unknown"; verdict: string } | null;
  /** Health score of the whole run, 0 to 100; null if not measured. */
  health: number | null;
  /** Open findings (neither acknowledged nor muted); null if nothing could be checked. */
  findings: Counts | null;
  /** Fraction of the time spent on recording; null if unknown. */
  overhead: number | null;
  /** "Recording took 4.1 s of 312 s (1.3 %)"; empty for runs of earlier versions. */
  recording?: string;
}

export interface RunRow {
  /** Identifies the run in all other requests and in URLs. Stable across server restarts. */
  id: string;
  /** The id in run.json, which `sonde show` understands. */
  run_id: string;
  project: string;
  name: string;
  status: Status;
  /** Why the run ended, or why its folder cannot be read (status "broken"). */
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
  /** Deleted runs that can be restored. */
  trash: { id: string; project: string; name: string; deleted: number }[];
  /** Number of briefs still being computed; a `brief` event follows for each. */
  num_pending: number;
  /** Folders that are searched for runs, shown in the empty state. */
  places: string[];
  /** False with `sonde ui --read-only`, and for folders that are not writable. */
  can_delete: boolean;
}

export interface Overhead {
  fraction: Num;
  uncertainty: Num;
  /** Why the fraction is unknown, or what was recorded less often to limit it. */
  note: string;
}

export interface RunDetail extends RunRow {
  path: string;
  command: string[];
  host: string;
  pid: number;
  world_size: number;
  environment: Record<string, unknown>;
  git: Record<string, unknown> | null;
  /** The full config (non-finite numbers as strings). */
  full_config: Record<string, unknown>;
  overhead: Overhead | null;
  /** Sentences about what was requested but never recorded. */
  coverage: string[];
  /** Problems with the recording itself: damage, dropped rows. */
  warnings: string[];
  first_step: number;
  num_sites: number;
  num_scalars: number;
  num_snapshots: number;
  /** Indices of the scalars that the overview draws first; null if not logged. */
  headline: { loss: number | null; val_loss: number | null; lr: number | null };
}

export interface Site {
  /** Identifies the series in requests. */
  i: number;
  kind: string;
  name: string;
  shape: number[];
  dtype: string;
  /** The module it belongs to. */
  owner: string;
  module_type: string;
  /** Position in the forward pass; sites of a kind are listed in this order. */
  order: number;
  aliases: string[];
}

export interface Stat {
  name: string;
  meaning: string;
  /** Scale of a heatmap of this stat. */
  scale: "log10" | "linear";
  /** Requires a histogram, which is not recorded at every step. */
  needs_hist: boolean;
}

export interface Scalar {
  i: number;
  name: string;
  /** Whether sonde recorded it for its checks (attn/…, rnn/…, unit/…), instead of the user logging it. */
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

/** Several series with a common step axis. */
export interface Lines {
  last_step: number;
  from: number;
  to: number;
  /** Steps per bucket, each reduced to its minimum and maximum; 0 if every recorded step is included. */
  steps_per_bucket: number;
  /** Whether a point may be the average of several steps (very long runs, very many series). */
  is_merged: boolean;
  steps: Float64Array;
  series: LineSeries[];
}

export interface LineSeries {
  /** Index of the site or scalar; -1 for series that only have a name (health, system). */
  i: number;
  name: string;
  /** Parallel to `steps`; NaN where the series has no point. */
  values: Float64Array;
  /** Steps at which the value is NaN or infinite (the first of each bucket). Always complete. */
  nonfinite: Float64Array;
}

/**
 * Rows × columns of u8 codes: 0 is missing, 1..254 is a value from lo to hi, 255 is NaN or infinite. A higher code deserves
 * more attention, and a cell holds the highest code of the steps it covers. Rows and columns can therefore be merged with
 * max() without hiding a single NaN or spike.
 */
export interface Heat {
  last_step: number;
  kind: string;
  stat: string;
  scale: "log10" | "linear";
  /** Values of codes 1 and 254 (as log10 for scale "log10"). For health, lo = 100 and hi = 0. */
  lo: number;
  hi: number;
  /** False for a preview of merged steps; request again after `retry_ms` for exact values. */
  is_exact: boolean;
  retry_ms: number;
  /** Column c covers the steps from first + c * steps_per_column up to the next column, exclusive. */
  first: number;
  steps_per_column: number;
  num_columns: number;
  num_rows: number;
  /** Site index of each row; -1 for kinds without sites (health). */
  rows: Int32Array;
  /** Row names, only for kinds without sites (health: module paths, "" for the whole run) and for ratios. */
  labels: string[];
  /** num_rows × num_columns, row by row. */
  codes: Uint8Array;
}

/** The value of a heatmap code; NaN for 0, Infinity for 255. */
export function heatValue(heat: { scale: string; lo: number; hi: number }, code: number): number {
  if (code === 0) return NaN;
  if (code === 255) return Infinity;
  const place = heat.lo + ((code - 1) / 253) * (heat.hi - heat.lo);
  return heat.scale === "log10" ? 10 ** place : place;
}

export interface Cell {
  i: number;
  /** The requested step; -1 if the site was never recorded. */
  step: number;
  /** The step of these values: the last recorded one at or before the requested step. */
  recorded_step: number;
  stats: Record<string, Num>;
}

/** Histograms: 64 bins of binary exponents × columns as in Heat. Counts are summed over the steps of a column. */
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
  /** Per column: number of elements, of zeros, and of NaN or infinite elements. */
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
  /** The series to draw: a stat of a site, or a scalar; null if it was not recorded. */
  link: { i: number; stat: string } | { scalar: number } | null;
}

export interface Finding {
  n: number;
  /** Stable identifier of the finding; its state is stored under this key. */
  key: string;
  rule: string;
  severity: Severity;
  confidence: number;
  step: number;
  last_step: number;
  sites: string[];
  /** Index of a site to link to for each name; null if none was recorded. */
  links: (number | null)[];
  message: string;
  evidence: Evidence[];
  remedy: string;
  references: string[];
  /** URL of the page about its rule; offline: `sonde explain RULE`. */
  doc: string;
  /** The traceback of the exception that ended the program; usually empty. */
  traceback: string;
  /** `n` of the findings that are a consequence of this one. */
  cause_of: number[];
  is_explained: boolean;
  state: FindingState;
}

export interface Findings {
  last_step: number;
  /** "diagnosis": all rules ran on the full recording. "recorded": findings from training only (very long runs). */
  source: "diagnosis" | "recorded";
  findings: Finding[];
  counts: Counts;
  num_rules: number;
  /** Rules without data, and rules that failed. */
  blind: string[];
  failed: string[];
  /** What to record to enable more checks. */
  gaps: string[];
  /** Nothing was recorded that the rules check: no finding then means nothing. */
  is_blind: boolean;
}

/** Health scores; `lines.series[0]` is the whole run (name ""). */
export interface Health {
  lines: Lines;
  last: number | null;
  /** Latest score of each layer, lowest first. */
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

/** Gradient flow along the depth of the model: tables of layers × columns, NaN where nothing was recorded. */
export interface Flow {
  last_step: number;
  /** Source of the gradients: "grad" (parameters) or "actgrad" (activations, if recorded). */
  kind: string;
  first: number;
  steps_per_column: number;
  num_columns: number;
  layers: { path: string; type: string; order: number; sites: number[] }[];
  /** num_layers × num_columns each: root mean square, mean |x| (the pressure) and largest |x| of the gradient's finite
   *  elements. `peak` is Infinity where some elements were non-finite. */
  rms: Float32Array;
  pressure: Float32Array;
  peak: Float32Array;
  /** Root mean square of the layer's activations, and 1 where some of them were non-finite. */
  act_rms: Float32Array;
  act_odd: Uint8Array;
  /** Scalar indices by stat, for each attention and each recurrent module. */
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
  /** Index of the site with the same name; null if it has no statistics. */
  i: number | null;
}

export interface Snapshots {
  snapshots: SnapshotInfo[];
  /** Why snapshots cannot be shown (missing extra, damaged store); "" otherwise. */
  problem: string;
}

/** A tensor of a snapshot as an image: each pixel is the signed element of largest magnitude in its block. */
export interface TensorImage {
  step: number;
  n: number;
  name: string;
  shape: number[];
  dtype: string;
  /** Rows × columns of the tensor as a matrix, before downsampling. */
  matrix: [number, number];
  height: number;
  width: number;
  /** height × width, including NaN and infinities. */
  pixels: Float32Array;
  min: Num;
  max: Num;
  rms: Num;
  num_nan: number;
  num_inf: number;
  /** Singular values in descending order, from at most 1,024 evenly spaced rows and columns. Empty for vectors. */
  spectrum: Float64Array;
  spectrum_of: [number, number];
  stable_rank: Num;
}

export interface CompareRow {
  name: string;
  last: Num[];
  min: Num[];
  max: Num[];
  /** Index of the scalar in each run; null if it was not logged. */
  scalars: (number | null)[];
}

/** The first divergence of a run from the first run of the list. */
export interface Divergence {
  id: string;
  /** null if no series differs by more than rounding in the shared steps. */
  first: {
    step: number; series: string; a: Num; b: Num;
    /** Whether the batches differ; `a` and `b` are then batch hashes. */
    is_batch: boolean;
    /** What agreed until then, and possible causes. */
    reason: string;
  } | null;
  num_steps: number;
  series: { series: string; step: number; a: Num; b: Num }[];
  only_a: string[];
  only_b: string[];
  /** Why the runs could not be compared; "" otherwise. */
  problem: string;
}

export interface Compare {
  runs: RunRow[];
  /** Settings that differ; null if a run does not have the setting. */
  config: { key: string; values: (string | null)[] }[];
  metrics: CompareRow[];
  /** Name of the metric that is the training loss; null if it was not logged. */
  loss: string | null;
  divergences: Divergence[];
  /** Kinds that all runs have, for the ratio heatmap. */
  kinds: string[];
}

/** A notification that something changed; views fetch their data again. */
export interface Nudge {
  /** "run": a run advanced or ended. "runs": the list changed. "brief": one is ready. "findings": findings changed. */
  type: "run" | "runs" | "brief" | "findings";
  run?: string;
  last_step?: number;
  status?: Status;
  reason?: string;
  brief?: Brief;
}

export interface Span {
  /** First and last step, inclusive; omitted for the whole run. */
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

/** Where data comes from. Views call the functions below, never fetch(). */
export interface Source {
  readonly kind: "live" | "report";
  get(path: string, signal?: AbortSignal): Promise<ArrayBuffer>;
  send(method: "POST" | "DELETE", path: string, body?: unknown): Promise<ArrayBuffer>;
  /** Subscribe to nudges; returns a function that unsubscribes. `onState` reports whether the connection is up. */
  listen(onNudge: (nudge: Nudge) => void, onState?: (isUp: boolean) => void): () => void;
}

class LiveSource implements Source {
  readonly kind = "live";

  async get(path: string, signal?: AbortSignal): Promise<ArrayBuffer> {
    return this.request(path, { method: "GET", signal: signal ?? null });
  }

  async send(method: "POST" | "DELETE", path: string, body?: unknown): Promise<ArrayBuffer> {
    const headers: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
    return this.request(path, { method, headers, body: body === undefined ? null : JSON.stringify(body) });
  }

  private async request(path: string, init: RequestInit): Promise<ArrayBuffer> {
    let response: Response;
    try {
      response = await fetch(path, { ...init, credentials: "same-origin", referrerPolicy: "no-referrer" });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new ApiError("The server is not responding. Is `sonde ui` still running?", 0, "offline");
    }
    const bytes = await response.arrayBuffer();
    if (!response.ok) throw asError(bytes, response.status);
    return bytes;
  }

  listen(onNudge: (nudge: Nudge) => void, onState?: (isUp: boolean) => void): () => void {
    // Browsers allow six connections per host, so a hidden tab closes its stream; otherwise the seventh tab would stall.
    let stream: EventSource | null = null;
    let retry: ReturnType<typeof setTimeout> | undefined;
    let wait_ms = 500;
    const close = () => {
      clearTimeout(retry);
      stream?.close();
      stream = null;
    };
    const open = () => {
      close();
      if (document.hidden) return;
      stream = new EventSource("/api/events");
      stream.onopen = () => {
        wait_ms = 500;
        onState?.(true);
        onNudge({ type: "runs" }); // catch up on changes missed while disconnected
      };
      stream.onmessage = (event) => onNudge(JSON.parse(event.data) as Nudge);
      stream.onerror = () => {
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
    return new ApiError(`The server returned HTTP ${status}.`, status, "unknown");
  }
}

/** Parameters that only select a range or resolution; a report contains a single response for all of them. */
const VIEW_PARAMETERS = ["from", "to", "w", "points", "rows"];

/** The key of a response in a report: the path with sorted parameters, without VIEW_PARAMETERS. */
export function reportKey(path: string): string {
  const [where, query = ""] = path.split("?");
  const kept = query.split("&").filter((part) => part && !VIEW_PARAMETERS.includes(part.split("=")[0]!));
  return kept.length ? `${where}?${kept.sort().join("&")}` : where!;
}

/** Reads responses embedded in the page: <script type="application/octet-stream" id="sonde-data">base64 of gzip</script> */
class ReportSource implements Source {
  readonly kind = "report";
  private answers: Promise<Map<string, ArrayBuffer>>;

  constructor(text: string) {
    this.answers = unpack(text);
  }

  async get(path: string): Promise<ArrayBuffer> {
    const found = (await this.answers).get(reportKey(path));
    if (!found) throw new ApiError("Not included in this report. Open the run with `sonde ui`.", 404, "not_in_report");
    return found;
  }

  async send(): Promise<ArrayBuffer> {
    throw new ApiError("Reports are read-only. Open the run with `sonde ui`.", 405, "not_in_report");
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

/** Split a binary response: "SNB1", u32 header length, header (JSON, padded to 8), body. Little-endian. */
function split(bytes: ArrayBuffer): { header: Header; body: ArrayBuffer } {
  const view = new DataView(bytes);
  if (bytes.byteLength < 8 || view.getUint32(0, true) !== 0x31424e53) throw new ApiError("Invalid response from the server.", 0, "bad_answer");
  const end = 8 + view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, end - 8))) as Header;
  return { header, body: bytes.slice(end) };
}

/** Decode a binary response into its header and its named arrays. */
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

/** Join the lines of several responses on one step axis. Needed for reports, which store each series separately. */
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

// ---------------------------------------------------------------------------------------------------------- endpoints

/**
 * Exchange the token in the fragment (`#token=…`) for a cookie and remove it from the address bar. Returns whether there
 * was one. Call once before anything else. After that, an ApiError "unauthorized" means that the user needs a new URL.
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

/** Sites, scalars, stats and the module tree. Fetch again after the first step, or when an index is unknown. */
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

/** Scalars. At most 64 series per request, `points` up to 4,000. */
export const getScalars = (
  id: string,
  which: readonly number[],
  options: Span & { points?: number } = {},
  signal?: AbortSignal,
): Promise<Lines> => manyLines(`/api/runs/${id}/scalars`, which, { ...options }, signal);

/** One stat of several sites. At most 64 series per request. */
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
 * The heatmap of all sites of a kind, in the order of the forward pass, with about `w` columns (up to 4,096). `rows` is a
 * range of positions in that order ("0-499").
 */
export const getHeat = async (
  id: string,
  kind: string,
  stat: string,
  options: Span & { w?: number; rows?: string } = {},
  signal?: AbortSignal,
): Promise<Heat> => decodeHeat(await source.get(`/api/runs/${id}/heat` + query({ kind, stat, ...options }), signal));

/** The exact values of all stats of a site at a step. */
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

/** System metrics by step, and "throughput (steps/s)" computed from the timestamps of scalars. */
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

/** Compare two to eight runs; the first is the baseline. */
export const getCompare = (ids: readonly string[], signal?: AbortSignal): Promise<Compare> =>
  json(`/api/compare?ids=${ids.join(",")}`, signal);

/**
 * The heatmap of b / a for the sites they share, as log10 of the ratio: codes 1..254 from lo = -hi to hi, 127.5 is equal.
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

/** Move a run to the trash; `restoreRun` restores it. The server refuses to delete a run that is still running. */
export async function deleteRun(id: string): Promise<void> {
  await source.send("DELETE", `/api/runs/${id}`);
}

export async function restoreRun(id: string): Promise<void> {
  await source.send("POST", `/api/runs/${id}/restore`);
}
