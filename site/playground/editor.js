// The text of a schedule, with the actions marked at which the checker stops.

export class Editor {
  #text = document.getElementById("text");
  #marks = document.getElementById("marks");
  #marked = [];
  #known = "";

  constructor(changed) {
    for (const kind of ["input", "change"])
      this.#text.addEventListener(kind, () => {
        if (this.#text.value === this.#known) return;
        this.#known = this.#text.value;
        this.mark([]);
        changed(this.#known);
      });
    this.#text.addEventListener("scroll", () => this.#align());
  }

  set value(text) {
    if (this.#text.value !== text) this.#text.value = text;
    this.#known = this.#text.value;
    this.mark([]);
  }

  mark(marks) {
    this.#marked = marks;
    const nodes = this.#text.value.split("\n").flatMap((line, number) => {
      const own = marks.filter(mark => mark.line === number).sort((one, other) => one.start - other.start);
      const row = document.createElement("span");
      if (own.length) row.className = "row";
      let at = 0;
      for (const {start, end} of own) {
        const mark = document.createElement("mark");
        mark.textContent = line.slice(start, end ?? undefined) || " ";
        row.append(line.slice(at, start), mark);
        at = end ?? line.length;
      }
      row.append(line.slice(at));
      return [row, "\n"];
    });
    this.#marks.replaceChildren(...nodes);
    this.#align();
  }

  // Selects the first marked action.
  goto() {
    const [mark] = this.#marked;
    if (!mark) return;
    const before = this.#text.value.split("\n").slice(0, mark.line).reduce((sum, line) => sum + line.length + 1, 0);
    const line = this.#text.value.split("\n")[mark.line] ?? "";
    this.#text.focus();
    this.#text.setSelectionRange(before + mark.start, before + (mark.end ?? line.length));
  }

  #align() {
    this.#marks.scrollTop = this.#text.scrollTop;
    this.#marks.scrollLeft = this.#text.scrollLeft;
  }
}
