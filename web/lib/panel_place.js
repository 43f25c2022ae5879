// Where the panel opens: the frontend's bottom area, or a box of our own where there is none.

import { button, element } from "./dom.js";
import { text } from "./texts.js";

export const TAB = "speed-tier-panel";

export class PanelPlace {
  #app;
  #panel;
  #floating = null;

  constructor(app, panel) {
    this.#app = app;
    this.#panel = panel;
  }

  // The tab as the frontend wants it registered.
  tab() {
    return {
      id: TAB,
      title: "Speed Tier",
      type: "custom",
      targetPanel: "terminal",
      render: (container) => this.#panel.mount(container),
      destroy: () => this.#panel.unmount(),
    };
  }

  open() {
    if (!this.#panel.isOpen) this.toggle();
  }

  toggle() {
    const manager = this.#app.extensionManager;
    // With the old menu the frontend opens an empty area, if any.
    if (manager?.setting?.get("Comfy.UseNewMenu") === "Disabled") return this.#toggleFloating();
    manager?.bottomPanel?.toggleBottomPanelTab?.(TAB);
  }

  #toggleFloating() {
    if (this.#floating) {
      this.#panel.unmount();
      this.#floating.remove();
      this.#floating = null;
      return;
    }
    const box = element("div", "speed-tier-floating");
    box.setAttribute("role", "dialog");
    box.setAttribute("aria-label", text("title"));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#toggleFloating();
      event.stopPropagation(); // the page's shortcuts are not meant here
    });
    const inner = element("div", "speed-tier-floating-inner");
    const closer = button(text("close"), "speed-tier-button", () => this.#toggleFloating());
    box.append(closer, inner);
    document.body.append(box);
    this.#floating = box;
    this.#panel.mount(inner);
    closer.focus();
  }
}
