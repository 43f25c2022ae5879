// Draws with a gap between and never while the page is hidden; what was missed is drawn on return.
// No animation frames: a browser that paints takes the GPU from the run.

export class Scheduler {
  #draw;
  #gap_ms;
  #timer = 0;
  #last = -Infinity;
  draws = 0;
  spent_ms = 0; // on the main thread, in all

  constructor(draw, gap_ms) {
    this.#draw = draw;
    this.#gap_ms = gap_ms;
  }

  soon() {
    if (document.hidden || this.#timer) return;
    const wait = this.#last + this.#gap_ms - performance.now();
    if (wait <= 0) return this.#now();
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      if (!document.hidden) this.#now();
    }, wait);
  }

  #now() {
    const began = performance.now();
    this.#last = began;
    this.draws++;
    this.#draw();
    this.spent_ms += performance.now() - began;
  }
}
