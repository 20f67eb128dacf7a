// Sphinx finds a page only if it has every word of the query, so a sentence finds nothing. And it
// does not count how often or where a page has a word. Here each section has a score, BM25's
// (Robertson and Zaragoza, 2009, "The Probabilistic Relevance Framework"), for any of the words.
// Titles and names of objects keep Sphinx's scores.
{
  const SATURATION = 1.2; // k1 of BM25: how soon a word that is said again counts no more
  const LENGTH = 0.75; // b of BM25: how much a long section is held back
  const HEADING = 3; // number of times that a word of a heading or of a page's title counts
  const FOUND_BY = 3; // what a word of found_by.txt adds: more than any number in the text
  const WHOLE = 100; // what a whole entry of that file adds: more than any title
  const MOST = 20; // number of sections that are shown
  const REFERENCE = /^(notebooks\/|api\/|benchmarks$|index$)/; // these name almost everything

  const stemmer = new Stemmer();
  const stems = (text) =>
    splitQuery(text.toLowerCase())
      .filter((word) => !stopwords.has(word) && !/^\d+$/.test(word)) // as Sphinx does
      .map((word) => stemmer.stemWord(word));
  const key = (words) => [...new Set(words)].sort().join(" ");

  /** What the scores need to know of each section, of each word and of all sections. */
  const count = () => {
    const sections = SECTIONS.map(({ page, name, anchor, text, foundBy }) => {
      const times = new Map(); // word -> number of times that the section has it
      const words = stems(text);
      const add = (word, number) => times.set(word, (times.get(word) ?? 0) + number);
      words.forEach((word) => add(word, 1));
      stems(name).forEach((word) => add(word, HEADING));
      const entries = foundBy.map(stems);
      return {
        ...{ page, name, anchor, times, length: words.length },
        ...{ foundBy: new Set(entries.flat()), whole: new Set(entries.map(key)) },
      };
    });
    const having = new Map(); // word -> number of sections that have it
    for (const { times, foundBy } of sections)
      for (const word of new Set([...times.keys(), ...foundBy]))
        having.set(word, (having.get(word) ?? 0) + 1);
    const weights = new Map();
    for (const [word, number] of having)
      weights.set(word, Math.log(1 + (sections.length - number + 0.5) / (number + 0.5)));
    const mean = sections.reduce((sum, { length }) => sum + length, 0) / sections.length;
    return { sections, weights, mean };
  };

  let counted;
  Search.performTermsSearch = (terms) => {
    const { sections, weights, mean } = (counted ??= count());
    // A word that no section has stands for the best of the words that begin with it.
    const alike = (term) =>
      term.length < 3 ? [] : [...weights.keys()].filter((word) => word.startsWith(term));
    const asked = [...terms].map((term) => (weights.has(term) ? [term] : alike(term)));
    const score = ({ page, times, length, foundBy, whole }) => {
      const held = SATURATION * (1 - LENGTH + (LENGTH * length) / mean);
      const worth = (word) => {
        const number = times.get(word) ?? 0;
        const said = (number * (SATURATION + 1)) / (number + held);
        return weights.get(word) * (said + FOUND_BY * foundBy.has(word));
      };
      const sum = asked.reduce((sum, words) => sum + Math.max(0, ...words.map(worth)), 0);
      return (REFERENCE.test(page) ? 0.1 : 1) * sum + WHOLE * whole.has(key(terms));
    };
    const { docnames, filenames } = Search._index;
    return sections
      .map((section) => [section, score(section)])
      .filter(([, score]) => score > 0)
      .sort(([, one], [, other]) => other - one)
      .slice(0, MOST)
      .map(([{ page, name, anchor }, score]) => {
        const file = filenames[docnames.indexOf(page)];
        return [page, name, anchor, null, score, file, SearchResultKind.text];
      });
  };
  // A part of a name, as "hang" is of "change", comes after sections.
  Scorer.objPartialMatch = -4;
}
