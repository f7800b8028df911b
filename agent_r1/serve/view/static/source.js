// Where the data comes from: the server, or the data inside an exported page.

const embedded = document.getElementById("data");
const store = embedded ? JSON.parse(embedded.textContent) : null;

export const isExport = store !== null;
export const exportNote = store?.note ?? "";

/** Asks a question of agent_r1/serve/view/api.py. */
export async function ask(name, params = {}, signal = undefined) {
  if (store) return answerFromStore(name, params);
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const response = await fetch(`api/${name}?${new URLSearchParams(kept)}`, { signal });
  const content = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(content.error);
  return content;
}

/** Where the browser finds a picture of a run; null if this export lacks it. */
export function pictureSource(run, name) {
  return store ? (store.pictures[name] ?? null) : `pictures/${encodeURIComponent(run)}/${encodeURIComponent(name)}`;
}

function answerFromStore(name, params) {
  const missing = () => {
    throw new Error("This page was exported without it. Use agent-r1 view to see everything.");
  };
  const run = store.runs.find((one) => one.id === params.run);
  if (name === "runs") return { runs: store.runs, places: [] };
  if (!run) throw new Error(`There is no run ${params.run} in this file.`);
  const data = store.data[run.id];
  if (name === "metrics") return { ...data.metrics, since: params.since ?? 0, records: data.metrics.records.slice(params.since ?? 0) };
  if (name === "episodes") return filterEpisodes(data, params);
  if (name === "group") {
    const attempts = data.episodes.filter((row) => row.file === params.file && row.row === params.row);
    const rows = [...new Set(data.episodes.filter((row) => row.file === params.file).map((row) => row.row))];
    const at = rows.indexOf(params.row);
    return attempts.length ? { attempts, before: rows[at - 1], after: rows[at + 1], success_reward: data.success_reward } : missing();
  }
  if (name === "batch") return data.batches[params.file ?? Object.keys(data.batches).find((file) => file.startsWith("train"))] ?? missing();
  if (name === "episode") return data.episode[`${params.file}/${params.n}`] ?? missing();
  if (name === "tokens" || name === "dropped") return data[name][`${params.file}/${params.n}/${params.step}/${params.start ?? 0}`] ?? missing();
  return data[name] ?? missing();
}

const RANGES = ["step", "reward", "steps", "calls", "bad_calls", "tokens", "seconds"];

function filterEpisodes(data, params) {
  const text = (params.text ?? "").toLowerCase();
  const matches = data.episodes.filter(
    (row) =>
      ["kind", "row", "stop"].every((key) => !params[key] || params[key].split("\n").includes(row[key])) &&
      (!params.tool || row.tools.includes(params.tool)) &&
      (!params.role || row.roles.includes(params.role)) &&
      (!params.step || row.step === Number(params.step)) &&
      RANGES.every((key) => (!params[`${key}_min`] || row[key] >= params[`${key}_min`]) && (!params[`${key}_max`] || row[key] <= params[`${key}_max`])) &&
      (!text || JSON.stringify(data.episode[`${row.file}/${row.n}`] ?? row).toLowerCase().includes(text)),
  );
  const key = (params.sort || "-step").replace("-", "");
  const direction = (params.sort || "-step").startsWith("-") ? -1 : 1;
  matches.sort((a, b) => direction * (a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0) || b.step - a.step || a.n - b.n);
  const count = (names) => names.reduce((counts, one) => ({ ...counts, [one]: (counts[one] ?? 0) + 1 }), {});
  const offset = Number(params.offset ?? 0);
  return {
    matches: matches.length,
    rows: matches.slice(offset, offset + Number(params.limit ?? 200)), // `spread` is for runs with more than a file holds
    stops: { ...Object.fromEntries(data.episodes.map((row) => [row.stop, 0])), ...count(matches.map((row) => row.stop)) },
    tools: { ...Object.fromEntries(data.episodes.flatMap((row) => row.tools).map((tool) => [tool, 0])), ...count(matches.flatMap((row) => row.tools)) },
    roles: { ...Object.fromEntries(data.episodes.flatMap((row) => row.roles).map((role) => [role, 0])), ...count(matches.flatMap((row) => row.roles)) },
    kinds: [...new Set(data.episodes.map((row) => row.kind))],
    mean_reward: matches.length ? matches.reduce((sum, row) => sum + row.reward, 0) / matches.length : null,
    read: data.episodes.length,
    total: data.episodes.length,
    success_reward: data.success_reward,
  };
}
