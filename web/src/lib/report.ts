// The standard analyses of a run, as stored in a report. The Python side is src/sonde/show/analyses/analysis.py.

import { type Num, source } from "./api";

export type Tone = "good" | "watch" | "bad" | "unknown";

export interface Quantity {
  name: string;
  value: Num;
  meaning: string;
  is_step: boolean;
}

export interface AnalysisChart {
  title: string;
  lines: { name: string; x: number[]; y: Num[] }[];
  /** Layer names along x; empty if x is the step. */
  places: string[];
  is_log: boolean;
  marks: [number, string][];
}

export interface AnalysisTable {
  title: string;
  columns: string[];
  rows: (string | Num)[][];
}

export interface Analysis {
  key: string;
  title: string;
  tone: Tone;
  verdict: string;
  quantities: Quantity[];
  charts: AnalysisChart[];
  tables: AnalysisTable[];
}

export interface ReportData {
  analyses: Analysis[];
  checked: string;
  created: string;
  sonde_version: string;
  overhead: string;
}

/** Whether the report is being printed and everything should be expanded: <html data-print>. */
export const forPrint = typeof document !== "undefined" && document.documentElement.hasAttribute("data-print");

export async function getReport(run: string, signal?: AbortSignal): Promise<ReportData> {
  return JSON.parse(new TextDecoder().decode(await source.get(`/api/runs/${run}/report`, signal))) as ReportData;
}
