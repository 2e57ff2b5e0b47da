// Asks vpipe's Python code, which runs in a worker.

export class Refused extends Error {
  // Holds the problems that Python found: what, hint and where of each.
  constructor(problems) {
    super(problems[0].what);
    this.problems = problems;
  }
}

export class Python {
  #worker = new Worker("worker.js", {type: "module"});
  #waiting = new Map();
  #number = 0;

  constructor() {
    this.ready = new Promise((resolve, reject) => {
      const fail = what => {
        const error = new Refused([{what, hint: "reload the page; its folder must hold pyodide/ and vpipe.zip"}]);
        reject(error);
        for (const {reject} of this.#waiting.values()) reject(error);
      };
      this.#worker.onerror = event => fail(`Python did not start: ${event.message || "its worker could not be loaded"}`);
      this.#worker.onmessage = ({data}) => {
        if (data.ready) resolve();
        else if (data.failed) fail(`Python did not start: ${data.failed}`);
        else this.#settle(data.number, JSON.parse(data.answer));
      };
    });
  }

  ask(call, args = {}) {
    return new Promise((resolve, reject) => {
      const number = this.#number++;
      this.#waiting.set(number, {resolve, reject});
      this.#worker.postMessage({number, request: JSON.stringify({call, ...args})});
    });
  }

  #settle(number, {result, error}) {
    const {resolve, reject} = this.#waiting.get(number);
    this.#waiting.delete(number);
    if (error) reject(new Refused(error));
    else resolve(result);
  }
}
