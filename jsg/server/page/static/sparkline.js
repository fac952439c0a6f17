// A small curve of the last values of a number.

import { svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;
const KEPT = 120;

/** Keeps the last values, and draws them. `top` is the value at the upper edge; without it, the largest one is. */
export class Sparkline {
  #values = [];
  #line = svg("polyline", { class: "line", points: "" });
  #area = svg("polygon", { class: "area", points: "" });
  #top;

  constructor(top = null) {
    this.#top = top;
    this.element = svg(
      "svg",
      { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.#area,
      this.#line,
    );
  }

  /** Adds a value; null repeats the last one, because nothing happened. */
  add(value) {
    this.#values.push(value ?? this.#values.at(-1) ?? 0);
    if (this.#values.length > KEPT) this.#values.shift();
    const top = this.#top ?? Math.max(...this.#values, 1e-9);
    const first = KEPT - this.#values.length;
    const points = this.#values.map((each, index) => {
      const x = ((first + index) / (KEPT - 1)) * WIDTH;
      return `${x.toFixed(1)},${(HEIGHT - 1 - (Math.min(each / top, 1)) * (HEIGHT - 2)).toFixed(1)}`;
    });
    this.#line.setAttribute("points", points.join(" "));
    const begin = ((first / (KEPT - 1)) * WIDTH).toFixed(1);
    this.#area.setAttribute("points", [`${begin},${HEIGHT}`, ...points, `${WIDTH},${HEIGHT}`].join(" "));
  }
}
