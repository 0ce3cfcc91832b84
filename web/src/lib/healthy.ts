// The healthy range of a finding's evidence is written for people; where it is plain numbers it can be drawn too.

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
