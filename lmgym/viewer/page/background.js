// Work that the server does beside the page, such as a search: begun, looked at until it is done, cancelled.

import {get, post, remove} from "./source.js";

const PAUSE = 500; // ms between two looks

// look(tree) gets each state of the newest work, failed(error) why it could not be begun or looked at.
export function background({address, look, failed}) {
  let current = null; // an answer about any other work changes nothing

  async function answered(work, answer) {
    try {
      const tree = await answer;
      work.key = tree.key;
      if (work !== current) await end(work);
      else show(work, tree);
    } catch (error) {
      if (work !== current) return;
      current = null;
      failed(error);
    }
  }

  function show(work, tree) {
    if (tree.done) current = null;
    else work.timer = setTimeout(() => answered(work, get(`${address}/${work.key}`)), PAUSE);
    look(tree);
  }

  async function end(work) {
    clearTimeout(work.timer);
    if (work.key) await remove(`${address}/${work.key}`).catch(() => {});
  }

  // Returns whether there was anything to cancel.
  async function cancel() {
    const work = current;
    current = null;
    if (work) await end(work);
    return Boolean(work);
  }

  async function begin(body) {
    await cancel();
    current = {key: null, timer: 0};
    await answered(current, post(address, body));
  }

  return {begin, cancel};
}
