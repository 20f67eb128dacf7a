// Sphinx gives text 5, or 15 if a word of the query is in a heading of the page. At equal scores
// titles decide, so "1." and "Benchmarks" would come first. Here guides come before the pages that
// name almost everything, and a title that was typed comes before text. Titles, names of objects
// and entries of the index keep their scores.
Scorer.score = ([page, , , , score, , kind]) => {
  if (kind !== "text") return score;
  return score * (/^(notebooks\/|api\/|benchmarks$|index$)/.test(page) ? 0.1 : 0.8);
};
