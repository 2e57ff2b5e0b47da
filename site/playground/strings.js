// The page's texts, in English and Chinese. Names of schedules and the checker's messages are vpipe's own.

const EN = {
  title: "vpipe playground",
  lead: "Choose a pipeline schedule, change its size and costs, and see what every rank does. The page runs the code that vpipe trains with.",
  link: "Link", copy_link: "Copy a link to what you see", copied: "Copied", dark: "Dark", light: "Light",
  schedule: "Schedule", ranks: "Ranks", microbatches: "Microbatches", chunks: "Stages per rank", slices: "Slices per microbatch",
  update_every: "Update every", warmup: "Forwards of each stage before its first backward", limit: "Memory limit of a rank, in microbatches",
  costs: "Costs", forward: "Forward (F)", input: "Backward, input half (I)", weight: "Backward, weight half (W)",
  transfer: "Transfer", step: "Optimizer step", activation: "Memory of an activation", version: "Memory of a weight version",
  costs_note: "Of one microbatch on one rank, in any unit. A whole backward takes I + W. Where a rank has several stages, each takes its share.",
  reset: "Reset costs",
  first: "To the start", back: "One step back", play: "Play", pause: "Pause", forward_step: "One step forward", time: "Time",
  clock: "{time} of {end}",
  drawing: "Drawing of the schedule. Arrow keys step through it, space plays it.",
  memory_title: "Memory of each rank: activations, and weight versions where they have a size",
  at_most: "at most {peak}",
  starting: "Starting Python …", working: "Computing …", ready: "", unused: "Drawing from before the mistake",
  bubble: "Bubble", bubble_sub: "{share} of the time from a rank's first start to its last end",
  bubble_once: "{share}; once per run, not per update",
  period: "Period", period_sub: "from update to update; {each} per microbatch",
  period_steady: "of {count} in the steady state; {each} per microbatch",
  makespan: "Makespan", makespan_sub: "from the first start to the last end",
  peak: "Peak activations", peak_sub: "microbatches of a whole rank",
  versions: "Weight versions", versions_sub: "of the stage with most",
  staleness: "Staleness", staleness_sub: "updates, of the stage with most",
  microbatches_count: "{count} microbatches", one_microbatch: "1 microbatch",
  now: "Rank by rank", now_at: "at time {time}",
  now_note: "What each rank does and holds at the cursor, and its peaks over the whole schedule.",
  rank: "rank", stage: "stage", doing: "does now", idle: "idle", until: "until", held: "memory", peak_memory: "peak memory",
  peak_activations: "peak activations", weight_halves: "weight halves", waits: "idle time", version_used: "version {version}",
  compare: "All schedules compared", compare_note: "With the numbers above, the smallest bubble first. Without a flush the bubble comes once per run: compare the period.",
  stages_per_rank: "stages/rank", share: "share", period_each: "period/microbatch", no_flush: "no flush", once: "once",
  edit: "Edit the actions", edit_note: "One line per rank, one action per cell: stage, operation, microbatch, such as 2F0. F forward, B backward, I and W its halves, R recompute, STEP optimizer step, USE weight version. This is vpipe's CSV file of a schedule.",
  goto: "Go to the mistake", revert: "Undo all edits",
  hint: "hint: ",
  command: "The same on the command line", command_note: "It prints the same figures, and messages name its options.",
  edited_command: "Save the text above as edited.csv first.",
  about: {}, picture: {},
};

const ZH = {
  title: "vpipe 调度演练场",
  lead: "选择一种流水线调度，改变规模与开销，观察每个 rank 在做什么。页面直接运行 vpipe 训练时所用的代码。",
  link: "链接", copy_link: "复制当前状态的链接", copied: "已复制", dark: "深色", light: "浅色",
  schedule: "调度", ranks: "rank 数", microbatches: "微批次数", chunks: "每个 rank 的阶段数", slices: "每个微批次的片数",
  update_every: "更新间隔（微批次）", warmup: "各阶段首个反向之前的前向数（预热深度）", limit: "单个 rank 的内存上限（微批次）",
  costs: "开销", forward: "前向（F）", input: "反向：输入梯度部分（I）", weight: "反向：权重梯度部分（W）",
  transfer: "通信", step: "优化器更新", activation: "一份激活的内存", version: "一个权重版本的内存",
  costs_note: "一个微批次在一个 rank 上的开销，单位任意。完整的反向用时 I + W。一个 rank 有多个阶段时，各阶段平分。",
  reset: "恢复默认开销",
  first: "回到开头", back: "后退一步", play: "播放", pause: "暂停", forward_step: "前进一步", time: "时间",
  clock: "{time} / {end}",
  drawing: "调度图。方向键逐步查看，空格键播放。",
  memory_title: "各 rank 的内存：激活，以及设有大小的权重版本",
  at_most: "峰值 {peak}",
  starting: "正在启动 Python …", working: "计算中 …", ready: "", unused: "图为出错之前的结果",
  bubble: "气泡", bubble_sub: "占 rank 从首次开始到最后结束时间的 {share}",
  bubble_once: "{share}；整个训练只出现一次，而非每次更新",
  period: "周期", period_sub: "相邻两次更新的间隔；每个微批次 {each}",
  period_steady: "稳态下每 {count}；每个微批次 {each}",
  makespan: "总时长", makespan_sub: "从首次开始到最后结束",
  peak: "激活峰值", peak_sub: "以整个 rank 的微批次计",
  versions: "权重版本", versions_sub: "取最多的阶段",
  staleness: "陈旧度", staleness_sub: "以更新次数计，取最大的阶段",
  microbatches_count: "{count} 个微批次", one_microbatch: "1 个微批次",
  now: "逐个 rank 查看", now_at: "时刻 {time}",
  now_note: "光标处每个 rank 正在做什么、占用多少内存，以及整个调度中的峰值。",
  rank: "rank", stage: "阶段", doing: "正在执行", idle: "空闲", until: "直到", held: "内存", peak_memory: "内存峰值",
  peak_activations: "激活峰值", weight_halves: "待做的 W", waits: "空闲时间", version_used: "版本 {version}",
  compare: "全部调度对比", compare_note: "采用上面的数值，气泡小者在前。无 flush 的调度，气泡在整个训练中只出现一次，应比较周期。",
  stages_per_rank: "阶段 / rank", share: "占比", period_each: "周期 / 微批次", no_flush: "无 flush", once: "一次",
  edit: "编辑动作", edit_note: "每行一个 rank，每格一个动作：阶段、操作、微批次，例如 2F0。F 前向，B 反向，I 与 W 为反向的两部分，R 重计算，STEP 优化器更新，USE 使用某个权重版本。这就是 vpipe 的调度 CSV 文件。",
  goto: "定位到错误", revert: "撤销全部编辑",
  hint: "提示：",
  sizes: "{ranks} 个 rank，{stages} 个阶段，{microbatches} 个微批次，{flush}", with_flush: "每次更新排空（flush）", without_flush: "无 flush，每 {every} 个微批次更新一次",
  command: "对应的命令行", command_note: "命令会输出相同的数值；错误信息中提到的是命令行选项。",
  edited_command: "请先把上面的文本保存为 edited.csv。",
  about: {
    "1f1b": "1F1B：一次前向、一次反向交替，每批结束时排空（flush）。",
    "2bw": "PipeDream-2BW：不排空的 1F1B，无论流水线多深都只保留两个权重版本。",
    auto: "Auto：按给定的开销与内存搜索到的最佳顺序。",
    chimera: "Chimera：两条方向相反的 1F1B 流水线，互相填补空隙；每个阶段有两份权重。",
    dualpipe: "DualPipe：微批次从两端进入，一个方向的前向与另一方向的反向并行；每个阶段有两份权重。",
    dualpipe_v: "DualPipeV：每个 rank 两个阶段，呈 V 形，一个阶段的前向与另一阶段的反向并行。",
    gpipe: "GPipe：先做全部前向，再做全部反向，最后更新。",
    hanayo: "Hanayo：波浪式，微批次在各 rank 间来回一次或多次，方式同 1F1B。",
    interleaved: "交错 1F1B：每个 rank 有多个阶段，流水线以更小的块填充。",
    interleaved_zb: "交错零气泡：交错 1F1B，权重梯度推迟到 rank 空闲时再算。",
    looped_bfs: "循环广度优先：所有微批次先经过 rank 的第一个阶段，再经过第二个，然后返回。",
    pipedream: "PipeDream：不排空的 1F1B，每个或每几个微批次立即更新一次。",
    pipedream_vertical_sync: "PipeDream（垂直同步）：一个微批次在所有阶段使用 rank 0 的权重版本。",
    seq1f1b: "Seq1F1B：把每个微批次的序列切成若干片，按片交替前向与反向。",
    v_half: "V-Half：V 形，每个 rank 两个阶段，内存和气泡约为 1F1B 的一半。",
    v_min: "V-Min：V 形，每个 rank 两个阶段，内存约为 1F1B 的三分之一。",
    zb_h1: "ZB-H1：1F1B，权重梯度推迟到 rank 空闲时再算。",
    zb_h2: "ZB-H2：比 1F1B 多做几个前向，让权重梯度填满整个收尾阶段。",
    zb_v: "ZB-V：V 形，每个 rank 两个阶段，内存与 1F1B 相同而没有气泡。",
  },
  picture: {
    forward: "前向", backward: "反向", "input half of backward": "反向：输入部分", "weight half": "权重部分",
    recompute: "重计算", "optimizer step": "优化器更新", idle: "空闲", activations: "激活", "W halves": "待做的 W",
    versions: "版本", staleness: "陈旧度",
    "numbers: microbatches": "数字：微批次", "numbers: slices of microbatches": "数字：微批次的片",
    "; shades: the rank's stages, from its first to its last, the palest": "；深浅：该 rank 的各阶段，第一个最深，最后一个最浅",
    "; v: the weight version in use": "；v：所用的权重版本",
    "activations: the most that the rank holds at once, in microbatches": "激活：该 rank 同时保存的最大数量，以微批次计",
    "activations, W halves: the most that the rank holds at once, in microbatches": "激活、待做的 W：该 rank 同时保存的最大数量，以微批次计",
    "activations: the most that the rank holds at once, in slices of microbatches": "激活：该 rank 同时保存的最大数量，以微批次的片计",
    " of one stage": "（单个阶段）",
  },
};

const ALL = {en: EN, zh: ZH};
const LONGEST_FIRST = Object.keys(ZH.picture).sort((one, other) => other.length - one.length);

export class Words {
  constructor(language) {
    this.language = language in ALL ? language : "en";
    this.all = ALL[this.language];
    for (const [key, text] of Object.entries(this.all)) if (typeof text === "string" && key !== "sizes") this[key] = text;
  }

  fill(key, values) {
    return this.all[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
  }

  about({name, about}) {
    return this.all.about[name] || about;
  }

  // What Python says in English; in Chinese from its numbers.
  sizes(drawn) {
    if (!this.all.sizes) return drawn.sizes;
    const flush = drawn.flush ? this.all.with_flush : this.fill("without_flush", {every: drawn.update_every});
    return this.fill("sizes", {ranks: drawn.ranks.length, stages: drawn.stages.length, microbatches: drawn.microbatches, flush});
  }

  // A text of the picture: one as a whole, or a line that is put together from several.
  inPicture(text) {
    const {picture} = this.all;
    if (text in picture) return picture[text];
    if (!text.startsWith("numbers: ") && !text.startsWith("activations")) return text;
    return LONGEST_FIRST.reduce((line, part) => part in picture && part.length > 11 ? line.replace(part, picture[part]) : line, text);
  }
}
