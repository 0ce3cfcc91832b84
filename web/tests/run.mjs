// Bundles the unit tests with rolldown and runs them with Node's test runner.
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "rolldown";

const here = dirname(fileURLToPath(import.meta.url));
const out = mkdtempSync(join(tmpdir(), "sonde-web-"));
try {
  const names = readdirSync(here).filter((name) => name.endsWith(".test.ts"));
  const input = Object.fromEntries(names.map((name) => [name.replace(".ts", ""), join(here, name)]));
  await build({ input, platform: "node", output: { dir: out, format: "esm", entryFileNames: "[name].mjs" } });
  const files = names.map((name) => join(out, name.replace(".ts", ".mjs")));
  process.exitCode = spawnSync(process.execPath, ["--test", ...files], { stdio: "inherit" }).status ?? 1;
} finally {
  rmSync(out, { recursive: true, force: true });
}
