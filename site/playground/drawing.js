// Shows a schedule's picture with the memory of every rank below it, and a cursor at a moment.

const SVG = "http://www.w3.org/2000/svg";
const TITLE = 22; // above the first rank's row: the heads of columns. What is higher, the page shows in its place
const ROW = 34, GAP = 8, TOP = 26;
const SMALLEST = 0.75;

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

export class Drawing {
  #scroll = document.getElementById("scroll");
  #picture = document.getElementById("picture");
  #memory = document.getElementById("memory");
  #cursors = [];
  #marked = [];

  show(drawn, words) {
    this.drawn = drawn;
    this.#picture.innerHTML = drawn.svg; // made by vpipe/app/visualize/svg.py, which escapes the name
    const svg = this.#picture.firstElementChild;
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const rows = [...svg.querySelectorAll("rect.idle")].filter((row, _, all) => // not that of the legend
      row.getAttribute("x") === all[0].getAttribute("x") && row.getAttribute("height") === all[0].getAttribute("height"));
    const [from, to] = [rows[0], rows.at(-1)].map(row => Number(row.getAttribute("y")));
    const cut = from - TITLE, room = this.#scroll.clientWidth / width;
    this.scale = room < 1 && room > SMALLEST ? room : 1; // fits a little wider picture in; scrolls a much wider one
    this.#size(svg, cut, width, height - cut);
    for (const text of svg.querySelectorAll(":scope > text")) {
      if (Number(text.getAttribute("y")) <= cut) text.remove();
      else if (!text.firstElementChild) text.textContent = words.inPicture(text.textContent);
    }
    this.left = Number(rows[0].getAttribute("x")); // the row is the whole time
    this.width = Number(rows[0].getAttribute("width"));
    this.#rects = new Map();
    for (const title of svg.querySelectorAll("rect > title")) {
      const action = title.textContent.split(/[, ]/, 1)[0];
      this.#rects.set(action, [...this.#rects.get(action) || [], title.parentNode]);
    }
    this.#drawMemory(width, words);
    const below = to + Number(rows[0].getAttribute("height")) + 6;
    this.#cursors = [[svg, from - 6, below], [this.#memory.firstElementChild, TOP - 4, TOP + drawn.ranks.length * (ROW + GAP)]]
      .map(([parent, y1, y2]) => parent.appendChild(element("line", {class: "cursor", y1, y2})));
  }

  #rects = new Map();

  #size(svg, top, width, height) {
    svg.setAttribute("viewBox", `0 ${top} ${width} ${height}`);
    svg.setAttribute("width", width * this.scale);
    svg.setAttribute("height", height * this.scale);
  }

  #drawMemory(width, words) {
    const {ranks, end, most} = this.drawn, unit = this.width / end;
    const svg = element("svg", {role: "img", "font-size": 11});
    this.#size(svg, 0, width, TOP + ranks.length * (ROW + GAP));
    svg.append(element("title", {}, words.memory_title), element("text", {class: "soft", x: 14, y: 14}, words.memory_title));
    ranks.forEach((rank, number) => {
      const y = TOP + number * (ROW + GAP), floor = y + ROW, high = held => floor - (most ? held / most : 0) * (ROW - 3);
      let path = `M${this.left} ${floor}`, before = 0;
      for (const [time, held] of rank.memory) {
        const x = (this.left + time * unit).toFixed(2);
        path += `L${x} ${high(before).toFixed(2)}L${x} ${high(held).toFixed(2)}`;
        before = held;
      }
      path += `L${(this.left + this.width).toFixed(2)} ${high(before).toFixed(2)}`;
      svg.append(
        element("rect", {class: "track", x: this.left, y, width: this.width, height: ROW, rx: 3}),
        element("path", {class: "held", d: `${path}L${this.left + this.width} ${floor}Z`}),
        element("path", {class: "edge", d: path}),
        element("text", {x: 14, y: y + ROW / 2 + 4, "font-size": 12}, rank.name),
        element("text", {class: "soft", x: this.left + this.width + 14, y: y + ROW / 2 + 4},
          words.fill("at_most", {peak: rank.peak})));
    });
    this.#memory.replaceChildren(svg);
  }

  // What every rank does from a moment until the next one.
  doing(time) {
    return this.drawn.ranks.map(rank => {
      const events = rank.events.filter(([, , start, end]) => start <= time && (time < end || start === end && end === time));
      let held = 0;
      for (const [since, bytes] of rank.memory) {
        if (since > time) break;
        held = bytes;
      }
      return {name: rank.name, events, held};
    });
  }

  moveTo(time, follow) {
    const x = this.left + time * this.width / this.drawn.end;
    for (const cursor of this.#cursors) {
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
    for (const rect of this.#marked) rect.classList.remove("on");
    this.#marked = this.doing(time).flatMap(({events}) => events.flatMap(([action]) => this.#rects.get(action) || []));
    for (const rect of this.#marked) rect.classList.add("on");
    const {scrollLeft, clientWidth} = this.#scroll, seen = x * this.scale - scrollLeft;
    if (follow && (seen < 0.2 * clientWidth || seen > 0.8 * clientWidth))
      this.#scroll.scrollLeft = x * this.scale - 0.5 * clientWidth;
  }

  // The time at a place of the screen; null beside the timeline.
  timeAt(clientX) {
    if (!this.drawn) return null;
    const x = (clientX - this.#picture.firstElementChild.getBoundingClientRect().left) / this.scale - this.left;
    return x < 0 || x > this.width ? null : x / this.width * this.drawn.end;
  }
}
