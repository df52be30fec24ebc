// Ask the site's own search, as its pages do: node site_search.js search.json WORKER.js QUERY ...
// Prints one JSON list per query: the places of the first results.
const fs = require("fs");
const [index, worker, ...queries] = process.argv.slice(2);
const SETUP = 0, QUERY = 2;
let answer;
globalThis.self = { postMessage: message => answer(message) };
(0, eval)(fs.readFileSync(worker, "utf8"));
const ask = (type, data) => new Promise(resolve => { answer = resolve; self.onmessage({ data: { type, data } }); });

(async () => {
  const pages = JSON.parse(fs.readFileSync(index, "utf8"));
  await ask(SETUP, pages);
  for (const [id, input] of queries.entries()) {
    const { data } = await ask(QUERY, { input, page: { id, size: 10 } });
    console.log(JSON.stringify(data.items.map(item => pages.items[item.id].location)));
  }
})();
