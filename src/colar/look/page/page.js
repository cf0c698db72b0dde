// Starts the page: its data are JSON, compressed with gzip and written in base64.

"use strict";

(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (each) => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  ColarQuestions.start(await new Response(stream).json());
})();
