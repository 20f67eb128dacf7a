// Sphinx finds a page only if it has every word of the query, so a sentence finds nothing, and it
// does not count how often or where a page has a word. Here each section has a score, BM25's
// (Robertson and Zaragoza, 2009, "The Probabilistic Relevance Framework"), for any of the words.
// Titles, names of objects and entries of the index keep Sphinx's scores, from 5 to 100.
{
  const SATURATION = 1.2; // k1 of BM25: how soon a word that is said again counts no more
  const LENGTH = 0.5; // b of BM25: how much a long section is held back
  const HEADING = 3; // times that a word of a heading or of a page's title counts
  const FOUND_BY = 3; // what a word of found_by.py adds: more than any number in the text
  const MOST = 20; // sections that are shown
  const REFERENCE = /^(notebooks\/|api\/|benchmarks$|index$)/; // these name almost everything
  const stemmer = new Stemmer();

  const stems = (text) =>
    splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word));

  /** The sections with the number of times that each has a word; and each word's weight. */
  const count = () => {
    const sections = SECTIONS.map(({ page, title, heading, id, text, foundBy }) => {
      const times = new Map();
      const add = (words, weight) => words.forEach((word) => times.set(word, (times.get(word) ?? 0) + weight));
      const words = stems(text);
      add(words, 1);
      add(stems(`${title} ${heading}`), HEADING);
      return { page, id, times, foundBy: new Set(stems(foundBy)), words: words.length,
        name: heading ? `${title} > ${heading}` : title };
    });
    const having = new Map();
    for (const { times, foundBy } of sections)
      for (const word of new Set([...times.keys(), ...foundBy])) having.set(word, (having.get(word) ?? 0) + 1);
    const weights = new Map([...having].map(([word, number]) =>
      [word, Math.log(1 + (sections.length - number + 0.5) / (number + 0.5))]));
    return { sections, weights, mean: sections.reduce((sum, { words }) => sum + words, 0) / sections.length };
  };

  let counted;
  Search.performTermsSearch = (terms, excluded) => {
    const { sections, weights, mean } = (counted ??= count());
    // A word that no section has stands for those that begin with it.
    const asked = [...terms].flatMap((term) =>
      weights.has(term) ? term : [...weights.keys()].filter((word) => word.startsWith(term)));
    const scored = sections.map((section) => {
      const held = SATURATION * (1 - LENGTH + (LENGTH * section.words) / mean);
      const score = asked.reduce((sum, word) => {
        const times = section.times.get(word) ?? 0;
        const said = (times * (SATURATION + 1)) / (times + held);
        return sum + weights.get(word) * (said + FOUND_BY * section.foundBy.has(word));
      }, 0);
      return [section, [...excluded].some((word) => section.times.has(word)) ? 0 : score];
    });
    const { docnames, filenames } = Search._index;
    return scored
      .filter(([, score]) => score > 0)
      .sort(([, one], [, other]) => other - one)
      .slice(0, MOST)
      .map(([{ page, name, id }, score]) => [page, name, id && `#${id}`, null, score,
        filenames[docnames.indexOf(page)], SearchResultKind.text]);
  };
  Scorer.score = ([page, , , , score, , kind]) =>
    kind === "text" && REFERENCE.test(page) ? score * 0.1 : score;
}
