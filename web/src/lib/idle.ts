// Work that can wait until the page has nothing else to do.

/** Call back when the page is idle, in a browser that can tell, else soon. Returns how to forget it. */
export function whenIdle(work: () => void): () => void {
  if (typeof requestIdleCallback === "function") {
    const number = requestIdleCallback(work);
    return () => cancelIdleCallback(number);
  }
  const number = setTimeout(work, 50);
  return () => clearTimeout(number);
}
