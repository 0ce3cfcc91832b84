// Parses the healthy range of evidence, which is text such as "below 1e4" or "0.2 to 3.3", so that it can be drawn.

const NUMBER = String.raw`(-?\d[\d.,]*(?:e[+-]?\d+)?)`;
const FORMS: [RegExp, (a: number, b: number) => [number, number]][] = [
  [new RegExp(`^${NUMBER} to ${NUMBER}$`, "i"), (a, b) => [a, b]],
  [new RegExp(`^(?:at most|below|less than|well below|<=?) ${NUMBER}$`, "i"), (a) => [-Infinity, a]],
  [new RegExp(`^(?:at least|above|more than|well above|>=?) ${NUMBER}$`, "i"), (a) => [a, Infinity]],
];

export function healthyRange(words: string): [number, number] | undefined {
  for (const [form, range] of FORMS) {
    const [match, a = "", b = ""] = form.exec(words.trim()) ?? [];
    if (match !== undefined) return range(Number(a.replaceAll(",", "")), Number(b.replaceAll(",", "")));
  }
  return undefined;
}
