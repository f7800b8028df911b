// What is known of the runs, kept up to date while the page is visible. Pages read it and listen for changes.
import { ask, isExport } from "./source.js";

const POLL_MS = 2000;
const COLOURS = 8; // --series-0 .. --series-7 of the style sheet

export const runsState = { runs: [], places: [], loaded: false, error: null };
const curves = new Map(); // run -> {generation, records, statistics}
const order = new Map(); // run -> number of its colour

export const colourOf = (run) => `--series-${(order.get(run) ?? 0) % COLOURS}`;

export async function refreshRuns() {
  try {
    const answer = await ask("runs");
    for (const run of [...answer.runs].reverse()) if (!order.has(run.id)) order.set(run.id, order.size);
    Object.assign(runsState, answer, { loaded: true, error: null });
  } catch (error) {
    runsState.error = `The viewer does not answer (${error.message}). Is agent-r1 view still running?`;
  }
  document.dispatchEvent(new CustomEvent("runs"));
}

/** Waits for the first list of runs: a page may be opened by its own address. */
export async function runsLoaded(signal) {
  if (!runsState.loaded) await new Promise((done) => document.addEventListener("runs", done, { once: true, signal }));
}

/** The metric records and statistics of a run: asks only for what was added. */
export async function refreshCurves(run) {
  const known = curves.get(run) ?? { generation: 0, records: [], statistics: {}, read: 0, total: -1, isLate: false };
  const answer = await ask("metrics", { run, since: known.records.length, generation: known.generation });
  const isNew = answer.records.length > 0 || answer.generation !== known.generation;
  known.records = answer.generation === known.generation ? [...known.records.slice(0, answer.since), ...answer.records] : answer.records;
  known.generation = answer.generation;
  // The newest episodes may not be read yet when their metrics arrive: ask for their statistics once more.
  if (isNew || known.isLate || known.read !== known.total) {
    known.isLate = isNew;
    const statistics = await ask("statistics", { run });
    Object.assign(known, { statistics: statistics.steps, read: statistics.read, total: statistics.total });
    curves.set(run, known);
    return true;
  }
  curves.set(run, known);
  return false;
}

export const curvesOf = (run) => curves.get(run) ?? { records: [], statistics: {} };

/** Calls `work` now and every two seconds until `signal` is aborted; a hidden page rests. `isUrgent`: more often. */
export async function poll(work, signal, isUrgent = () => false) {
  while (!signal.aborted) {
    if (document.visibilityState === "visible") await work();
    if (isExport) return;
    await new Promise((done) => setTimeout(done, isUrgent() ? POLL_MS / 8 : POLL_MS));
  }
}
