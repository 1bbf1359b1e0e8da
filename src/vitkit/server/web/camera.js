// A photograph: by the phone's own camera program, else by a camera that the browser may use.

import { at, touch } from "./dom.js";
import { words } from "./strings.js";

// Shows the button where there is a camera; `take(blob)` gets a photograph made in the page.
export async function offerCamera(take, complain) {
  const button = at("camera");
  const devices = (await navigator.mediaDevices?.enumerateDevices?.().catch(() => [])) ?? []; // secure pages only
  const inPage = devices.some((device) => device.kind === "videoinput");
  button.hidden = !touch && !inPage;
  button.onclick = () => (touch ? at("capture").click() : photograph(take, complain));
}

async function photograph(take, complain) {
  const dialog = at("lens");
  const video = at("video");
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 1920 } } });
  } catch {
    return complain(words.cameraOff);
  }
  video.srcObject = stream;
  dialog.onclose = () => {
    stream.getTracks().forEach((track) => track.stop());
    video.srcObject = null;
  };
  at("lens-close").onclick = () => dialog.close();
  at("shoot").onclick = async () => {
    const picture = await still(video);
    dialog.close();
    if (picture) take(picture);
  };
  dialog.showModal();
  await video.play().catch(() => {}); // closed before the first frame
}

// What the camera shows now, as a PNG: nothing is lost on the way to the model.
function still(video) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  if (!canvas.width) return null;
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
