// Runs Python away from the page, so that the page never waits for it.
import {loadPyodide} from "./pyodide/pyodide.mjs";

async function start() {
  const [python, response] = await Promise.all([loadPyodide({indexURL: "./pyodide/"}), fetch("vpipe.zip")]);
  if (!response.ok) throw new Error(`vpipe.zip: ${response.status} ${response.statusText}`);
  python.unpackArchive(await response.arrayBuffer(), "zip");
  return python.pyimport("playground").answer;
}

const started = start();
started.then(() => postMessage({ready: true}), error => postMessage({failed: String(error.message || error)}));

onmessage = async ({data: {number, request}}) => {
  const answer = await started;
  postMessage({number, answer: answer(request)});
};
