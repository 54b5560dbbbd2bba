// The search runs in a Worker, and browsers start none for a page that is opened from a disk. There a hidden
// frame takes its place. The theme would load such a script from unpkg.com: `extra.polyfills` in mkdocs.yml.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.started = new Promise(resolve => {
        const script = inner.document.createElement("script")
        script.src = new URL(url, location.href)
        script.onload = () => resolve(inner)
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      this.started.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
