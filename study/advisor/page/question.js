// The calls of Python that a question needs, one after another. `open()` returns the `ask` of a new question, and
// `ask(method, ...words)` promises the text of an answer, JSON from study/advisor/calculator.py; `say` takes the messages
// to the page, each with the number of its question.
export function questions(open, say) {
  let newest = 0;
  // Files and changes are of the newest question.
  let current = open();

  async function compare(id, { words, config, name }) {
    const ask = open();
    [newest, current] = [id, ask];
    if (config) words = [JSON.parse(await ask("keep_config", name, config)).folder, ...words.slice(1)];
    const about = await ask("ask", JSON.stringify(words));
    say({ id, about });
    const { names } = JSON.parse(about);
    for (const strategy of names ?? []) {
      // A newer question ends this one between two strategies.
      if (newest !== id) return;
      say({ id, strategy, row: await ask("best", strategy) });
    }
    if (names && newest === id) say({ id, rank: await ask("rank") });
  }

  return async ({ id, call, ...rest }) => {
    try {
      if (call === "compare") await compare(id, rest);
      else say({ id, answer: await current(call, ...(rest.words ?? [])) });
    } catch (error) {
      say({ id, failed: String(error.message ?? error) });
    }
  };
}
