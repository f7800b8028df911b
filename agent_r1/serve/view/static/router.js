// Every view has an address: #/run/NAME/episode/FILE/N?view=tokens. Links work in the server's page and in an exported file.

export function currentRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  return { parts, params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function hrefTo(parts, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

export function go(parts, params) {
  location.hash = hrefTo(parts, params);
}

/** Changes parameters of the address without leaving the page or filling the history. */
export function setParams(changes) {
  const route = currentRoute();
  const href = hrefTo(route.parts, { ...route.params, ...changes });
  // The whole address: inside the frame of a notebook, "#/" alone would belong to the page around it.
  if (href !== location.hash) history.replaceState(null, "", location.href.split("#")[0] + href);
}
