// Routing: a path and a query, in the URL itself (server) or in its hash (report). Views keep their state in the query, so
// that a copied URL shows the same thing.

import { source } from "./api";

export type ViewName = "runs" | "report" | "overview" | "layers" | "tensor" | "flow" | "findings" | "compare" | "missing";

export interface Route {
  view: ViewName;
  /** ID of the run, for views of a run. */
  run: string | null;
  /** Index of the site, for the tensor view. */
  site: number | null;
  query: URLSearchParams;
}

export type Changes = Record<string, string | number | null | undefined>;

const VIEWS: ReadonlySet<string> = new Set(["layers", "flow", "findings", "report"]);

/** Reports are opened as files, so their routes are in the hash. */
export const inHash = source.kind === "report";

/** The ID of the run in a report: <html data-run="…">. */
export const reportRun = inHash ? (document.documentElement.dataset.run ?? "report") : null;

function currentUrl(): URL {
  return inHash ? new URL(location.hash.slice(1) || "/", "http://report") : new URL(location.href);
}

function safely(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function parse(path: string, query: URLSearchParams): Route {
  const words = path.split("/").filter(Boolean).map(safely);
  const route: Route = { view: "missing", run: null, site: null, query };
  if (words.length === 0 && reportRun) return { ...route, view: "report", run: reportRun };
  if (words.length === 0) return { ...route, view: "runs" };
  if (words[0] === "compare" && words.length === 1) return { ...route, view: "compare" };
  if (words[0] !== "run" || !words[1]) return route;
  const run = words[1];
  const view = words[2];
  if (words.length === 2) return { ...route, view: "overview", run };
  if (words.length === 3 && view && VIEWS.has(view)) return { ...route, view: view as ViewName, run };
  if (view === "tensor" && words.length === 4 && /^\d+$/.test(words[3] ?? "")) {
    return { ...route, view: "tensor", run, site: Number(words[3]) };
  }
  return route;
}

class Router {
  route = $state.raw<Route>(this.read());
  /** Path without the query. Views are rebuilt when the path changes, not when the query does. */
  path = $derived(pathOf(this.route));

  constructor() {
    window.addEventListener("popstate", () => (this.route = this.read()));
    window.addEventListener("hashchange", () => (this.route = this.read()));
    document.addEventListener("click", (event) => this.follow(event));
  }

  get query(): URLSearchParams {
    return this.route.query;
  }

  /** Navigate to a path such as `/run/ab12/layers?stat=rms`. */
  go(to: string, { replace = false } = {}): void {
    const url = inHash ? `#${to}` : to;
    if (replace) history.replaceState(null, "", url);
    else history.pushState(null, "", url);
    const before = this.path;
    this.route = this.read();
    if (this.path !== before) window.scrollTo(0, 0);
  }

  /** Change some query parameters and keep the others; `null` and "" remove a parameter. */
  set(changes: Changes, { push = false } = {}): void {
    const query = new URLSearchParams(this.route.query);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") query.delete(key);
      else query.set(key, String(value));
    }
    const text = query.toString();
    if (text === this.route.query.toString()) return;
    this.go(this.path + (text ? `?${text}` : ""), { replace: !push });
  }

  number(key: string): number | null {
    const text = this.route.query.get(key);
    const value = text === null || text === "" ? NaN : Number(text);
    return Number.isFinite(value) ? value : null;
  }

  private read(): Route {
    const url = currentUrl();
    return parse(url.pathname, url.searchParams);
  }

  /** Handle clicks on internal links without a page load, unless a modifier key is pressed. */
  private follow(event: MouseEvent): void {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = (event.target as Element | null)?.closest?.("a[href]");
    if (!(link instanceof HTMLAnchorElement) || link.target || link.origin !== location.origin || inHash) return;
    if (link.hasAttribute("download") || link.pathname.startsWith("/api/") || link.getAttribute("href")?.startsWith("#")) return;
    event.preventDefault();
    this.go(link.pathname + link.search);
  }
}

function pathOf(route: Route): string {
  switch (route.view) {
    case "runs":
      return "/";
    case "compare":
      return "/compare";
    case "overview":
      return runPath(route.run ?? "");
    case "tensor":
      return runPath(route.run ?? "", `tensor/${route.site}`);
    case "missing":
      return inHash ? currentUrl().pathname : location.pathname;
    default:
      return runPath(route.run ?? "", route.view);
  }
}

function runPath(run: string, view = ""): string {
  return `/run/${encodeURIComponent(run)}${view ? `/${view}` : ""}`;
}

/** A URL for `href`: `link("/run/ab12/tensor/7", {step: 150})`. */
export function link(path: string, query: Changes = {}): string {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  return (inHash ? "#" : "") + path + (text ? `?${text}` : "");
}

/** A URL inside a run: `to(id)`, `to(id, "layers")`, `to(id, "tensor/7", {step: 150})`. */
export function to(run: string, view = "", query: Changes = {}): string {
  return link(runPath(run, view), query);
}

export const router = new Router();
