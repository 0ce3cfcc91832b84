// Defers work until the page is idle.

/** Run `work` when the page is idle, or soon if the browser cannot tell. Returns a function that cancels it. */
export function whenIdle(work: () => void): () => void {
  if (typeof requestIdleCallback === "function") {
    const number = requestIdleCallback(work);
    return () => cancelIdleCallback(number);
  }
  const number = setTimeout(work, 50);
  return () => clearTimeout(number);
}
