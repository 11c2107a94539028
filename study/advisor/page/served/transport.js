// Python on this machine: `study serve`, which answers a call a request.
import { questions } from "./question.js";

export const header = "study advise, study explain and study releases of zero-study, by the Python of study serve on this machine: with its "
  + "torch also for models that only transformers' own code describes. Nothing is sent to another machine.";
const SLOW_MS = 2_000;

// `say` shows a text where the newest question is, and `listen` takes the answers.
export function connect(say, listen) {
  say("asking Python on this machine ...");
  let newest = null;

  function request(session, method, words) {
    const body = JSON.stringify({ session, method, words });
    return fetch("ask", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  }

  async function send(session, method, words) {
    let isAnswered = false;
    const slow = setInterval(async () => {
      const text = await waitingText(session).catch(() => null);
      if (text && !isAnswered && session === newest) say(text);
    }, SLOW_MS);
    let response;
    try {
      response = await request(session, method, words);
    } catch {
      throw new Error("study serve does not answer: it has ended, or its machine is not reached");
    } finally {
      isAnswered = true;
      clearInterval(slow);
    }
    const text = await response.text();
    if (!response.ok) throw new Error(text);
    return text;
  }

  async function waitingText(session) {
    const { ahead } = await (await request(session, "traces_ahead", [])).json();
    if (!ahead) return "still computing; a model that no table describes is traced first, which takes up to a minute ...";
    return `waiting for ${ahead} earlier ${ahead === 1 ? "trace" : "traces"}: models are traced one at a time, each for up to a minute ...`;
  }

  // Each question has its own session in Python, so that a new one does not wait for the call of the last. Calls of one
  // session are sent one at a time, in their order, as in a worker.
  function open() {
    const session = crypto.randomUUID();
    newest = session;
    let before = Promise.resolve();
    return (method, ...words) => {
      const answer = before.then(() => send(session, method, words));
      before = answer.catch(() => {});
      return answer;
    };
  }

  return questions(open, listen);
}
