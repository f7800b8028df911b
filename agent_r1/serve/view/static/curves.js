// Which curves there are, and how the records of a run become points.
import { number, percent, seconds, wholePercent } from "./dom.js";
import { colourOf, curvesOf } from "./store.js";

const perEpisode = (key, title) => ({ key: `episode/${key}`, title, note: "Mean per episode" });

/** The curves that are always shown if a run has them, in this order. */
export const CURVES = [
  { key: "success", kind: "eval", title: "Success on held-out rows", format: percent, tick: wholePercent, band: "success_stderr", note: "Evaluations ± two standard errors" },
  { key: "reward/mean", title: "Reward", band: "reward_stderr", note: "Mean of the training batch ± two standard errors" },
  { key: "success", title: "Success in training", format: percent, tick: wholePercent, band: "success_stderr", note: "Share of the training batch ± two standard errors" },
  perEpisode("steps", "Steps"),
  perEpisode("tool_calls", "Tool calls"),
  perEpisode("bad_calls", "Refused or failed calls"),
  perEpisode("response_tokens", "Response length in tokens"),
  { key: "entropy", title: "Entropy", note: "Mean per trained token" },
  { key: "kl_to_reference", title: "KL to the reference", note: "Mean per trained token" },
  { key: "reward_kl", title: "KL in the reward", note: "Mean per sampled token" },
  { key: "approx_kl", title: "KL of the update", note: "How far one update moved the policy" },
  { key: "mismatch_kl", title: "Mismatch KL", note: "Sampler against learner; should stay below 1e-3" },
  { key: "clip_fraction", title: "Clipped tokens", format: percent, tick: wholePercent, note: "Share of tokens that the clip left without gradient" },
  { key: "grad_norm", title: "Gradient norm", note: "Before clipping" },
  { key: "tokens_per_second", title: "Sampled tokens per second", note: "Of the batch, over the time to collect it" },
  { key: "group/zero_variance", title: "Groups without signal", format: percent, tick: wholePercent, note: "All attempts earned the same" },
  { key: "explained_variance", title: "Explained variance of the critic", note: "1 is perfect, 0 no better than the mean" },
  { key: "staleness/mean", title: "Staleness", note: "Mean age of trained tokens in policy versions" },
  { key: "loss", kind: "sft", title: "Loss of the warm start", note: "Supervised fine-tuning" },
].map((curve) => ({ kind: "train", format: number, ...curve }));

const HIDDEN = new Set(["kind", "step", "time", "panel"]);

/** Every other number that the runs recorded. */
export function otherCurves(runs) {
  const known = new Set(CURVES.map((curve) => `${curve.kind} ${curve.key}`));
  const found = new Map();
  for (const run of runs) {
    for (const record of curvesOf(run).records) {
      for (const [key, value] of Object.entries(record)) {
        const id = `${record.kind} ${key}`;
        if (!HIDDEN.has(key) && !known.has(id) && !found.has(id) && Number.isFinite(value)) found.set(id, { key, kind: record.kind, title: `${key} (${record.kind})`, format: number });
      }
    }
  }
  return [...found.values()].sort((a, b) => (a.kind + a.key < b.kind + b.key ? -1 : 1));
}

/** One line of a chart. `axis` is step or minutes. */
export function seriesOf(curve, run, axis) {
  const { records, statistics } = curvesOf(run);
  const errors = new Map((statistics[curve.kind] ?? []).map((entry) => [entry.step, entry[curve.band]]));
  const began = records[0]?.time ?? 0;
  const points = [];
  for (const record of records) {
    if (record.kind !== curve.kind || !(curve.key in record)) continue;
    const error = curve.band ? (record[curve.band] ?? errors.get(record.step)) : null;
    const x = axis === "minutes" ? (record.time - began) / 60 : record.step;
    points.push({ x, step: record.step, y: record[curve.key] ?? NaN, band: error ? 2 * error : null });
  }
  points.sort((a, b) => a.x - b.x);
  return { name: run, run, kind: curve.kind, colour: colourOf(run), points };
}

const PARTS = [
  { id: "update", label: "update", colour: "--part-update" },
  { id: "tools", label: "tools and environment", colour: "--part-tools" },
  { id: "sampling", label: "sampling", colour: "--part-sampling" },
];

/**
 * Seconds of each step: the update, and the time to collect, split between sampling and tools in proportion to the
 * seconds that episodes spent in each. Episodes overlap, so their seconds add up to more than the clock's.
 */
export function timeSplit(run, axis) {
  const { records, statistics } = curvesOf(run);
  const spent = new Map((statistics.train ?? []).map((entry) => [entry.step, entry]));
  const began = records[0]?.time ?? 0;
  const layers = PARTS.map((part) => ({ ...part, name: part.label, run, kind: "train", points: [] }));
  for (const record of records) {
    if (record.kind !== "train" || !Number.isFinite(record["time/collect"])) continue;
    const entry = spent.get(record.step);
    const both = entry ? entry.sampling + entry.waiting : 0;
    const share = both > 0 ? entry.waiting / both : 0;
    const parts = { update: record["time/update"] ?? 0, tools: record["time/collect"] * share, sampling: record["time/collect"] * (1 - share) };
    let height = 0;
    const x = axis === "minutes" ? (record.time - began) / 60 : record.step;
    for (const layer of layers) {
      height += parts[layer.id];
      layer.points.push({ x, step: record.step, y: height, own: parts[layer.id] });
    }
  }
  return layers;
}

export const timeCurve = { title: "Time of a step", format: seconds, note: "Collecting is split by what episodes waited for" };
