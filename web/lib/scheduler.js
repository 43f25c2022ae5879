// Draws with a gap between and never while the page is hidden; what was missed is drawn on return.
// No animation frames: a browser that paints takes the GPU from the run. The gap grows with what the
// last draw took, so that a draw takes no more than a share of the time.

export class Scheduler {
  #draw;
  #gap_ms;
  #timer = 0;
  #last = -Infinity;
  #last_ms = 0; // what it took
  #share;
  draws = 0;
  spent_ms = 0; // on the main thread, in all

  constructor(draw, gap_ms, share = 1) {
    this.#draw = draw;
    this.#gap_ms = gap_ms;
    this.#share = share;
  }

  soon() {
    if (document.hidden || this.#timer) return;
    const gap_ms = Math.max(this.#gap_ms, this.#last_ms / this.#share);
    const wait = this.#last + gap_ms - performance.now();
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
    this.#last_ms = performance.now() - began;
    this.spent_ms += this.#last_ms;
  }
}
