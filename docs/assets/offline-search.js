// Search where the site is read from disk: browsers start no worker from file://, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((done) => {
        this.frame.addEventListener("load", () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
          const script = inside.document.createElement("script");
          script.src = url;
          script.addEventListener("load", done);
          inside.document.head.append(script);
        }, { once: true });
      });
      document.body.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
