// A shared clock for relative times such as "3 min ago".

class Clock {
  now_s = $state(Date.now() / 1000);

  constructor() {
    setInterval(() => {
      if (!document.hidden) this.now_s = Date.now() / 1000;
    }, 5000);
  }
}

export const clock = new Clock();
