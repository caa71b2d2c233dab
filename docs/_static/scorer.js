// How the site's search ranks pages: what Sphinx counts for a hit (2 to 100), times the weight of the page's place.
const WEIGHTS = {"guides/": 3, "architecture": 3, "results/": 0.5, "contributing": 0.5, "changelog": 0.01};

var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const place = Object.keys(WEIGHTS).find((place) => page.startsWith(place));
    return score * (place ? WEIGHTS[place] : 1);
  },
  // Sphinx's own numbers, which a file in place of its scorer has to repeat.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
