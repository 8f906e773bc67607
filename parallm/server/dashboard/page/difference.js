// What differs between two completions, and how alike two texts are.

const MAX_WORDS = 600;

/** Return the place of the first token that differs, -1 where both lists are equal. */
export function firstDifference(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let place = 0; place < shorter; place++) if (one[place] !== other[place]) return place;
  return one.length === other.length ? -1 : shorter;
}

/** Return how alike two texts are, 0 to 1: twice the longest common run of words in order, by the words of both. */
export function likeness(one, other) {
  const [rows, columns] = [words(one), words(other)];
  if (!rows.length && !columns.length) return 1;
  let before = new Array(columns.length + 1).fill(0);
  for (const word of rows) {
    const now = [0];
    columns.forEach((column, place) => now.push(word === column ? before[place] + 1 : Math.max(now[place], before[place + 1])));
    before = now;
  }
  return (2 * before[columns.length]) / (rows.length + columns.length);
}

const words = (text) => (text.match(/[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? []).slice(0, MAX_WORDS);
