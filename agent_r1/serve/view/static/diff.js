// Where two conversations differ: words that are in one and not in the other are marked.
import { h, replace } from "./dom.js";

const MAX_PAIRS = 4_000_000; // the comparison takes the product of the numbers of words

/** For each word of both lists whether it is part of their longest common subsequence; null if there are too many. */
export function commonWords(a, b) {
  if (a.length * b.length > MAX_PAIRS) return null;
  const width = b.length + 1;
  const length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
  }
  const [left, right] = [a.map(() => false), b.map(() => false)];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      left[i] = true;
      right[j] = true;
      i += 1;
      j += 1;
    } else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return [left, right];
}

/** Marks the words of two columns that differ. */
export function markDifferences(left, right) {
  const sides = [left, right].map((column) => [...column.querySelectorAll(".text")].map((element) => ({ element, words: element.textContent.split(/(\s+)/) })));
  const flat = sides.map((texts) => texts.flatMap((text) => text.words.filter((word) => word.trim())));
  const found = commonWords(...flat);
  if (!found) return;
  sides.forEach((texts, side) => {
    let at = 0;
    for (const { element, words } of texts) replace(element, words.map((word) => (!word.trim() || found[side][at++] ? word : h("mark", {}, word))));
  });
}
