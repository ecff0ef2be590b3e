//! Options that several commands share.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use yunta_cluster::Emulation;
use yunta_comm::verbs::{QueueKind, VerbsConfig};
use yunta_comm::{LinkConfig, Transport};
use yunta_model::{Dims, KvType, Plan};

/// Which model, how it is cut, and how it computes.
#[derive(Args, Clone)]
pub(crate) struct ComputeArgs {
    /// A GGUF file, a Hugging Face folder, a repository (org/name), or a short name (smollm2)
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) cut: CutArgs,
    /// Compute threads per rank [default: cores divided by ranks]
    #[arg(long, short = 't')]
    threads: Option<usize>,
    /// Compute in 32-bit floating point throughout (slower; for comparisons)
    #[arg(long)]
    pub(crate) float32: bool,
}

impl ComputeArgs {
    /// Compute threads of each of so many ranks: what was asked for, or the cores shared out.
    pub(crate) fn threads(&self, ranks: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        self.threads.unwrap_or_else(|| cores() / ranks.max(1)).max(1)
    }
}

/// How keys and values are kept.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvArg {
    /// 16-bit floating point
    F16,
    /// 8 bits, and a scale for every 32 elements
    Q8,
}

impl ComputeArgs {
    /// The kind of cache: with `--float32` all of it is.
    pub(crate) fn kv_type(&self, kv: KvArg) -> KvType {
        match kv {
            KvArg::Q8 => KvType::I8,
            KvArg::F16 if self.float32 => KvType::F32,
            KvArg::F16 => KvType::F16,
        }
    }
}

/// How a model serves requests.
#[derive(Args, Clone)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Tokens per sequence, prompt and answer together [default: the model's, at most 8192]
    #[arg(long)]
    pub(crate) context: Option<usize>,
    /// Sequences computed at once
    #[arg(long, default_value_t = 32)]
    pub(crate) slots: usize,
    /// Requests that may wait beside those; more are refused with 429
    #[arg(long, default_value_t = 64)]
    pub(crate) queue: usize,
    /// Tokens in the KV cache, shared by all sequences [default: 16 contexts, in at most a third of
    /// the free memory]
    #[arg(long)]
    pub(crate) kv_tokens: Option<usize>,
    /// How keys and values are kept: f16, or q8 for half the memory
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    pub(crate) kv: KvArg,
    /// How much longer a step may take for the sake of a new prompt while others are answered
    #[arg(long, default_value_t = 2.0)]
    pub(crate) stall_ratio: f64,
    /// Tokens guessed ahead at most, where the text repeats itself (0: none); the output is the same
    #[arg(long, default_value_t = 15)]
    pub(crate) draft_tokens: usize,
    /// A small model of the same family that guesses ahead; the output is the same
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft_model: Option<String>,
    /// Keep computed prefixes (long system prompts) in this folder, for the next start
    #[arg(long, value_name = "FOLDER")]
    pub(crate) prefix_cache: Option<PathBuf>,
    /// MiB that each rank may keep there
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    pub(crate) prefix_cache_mib: u64,
    /// Tokens per step: prompts are computed in chunks of so many
    #[arg(long, default_value_t = 512, visible_alias = "prefill-step-size")]
    pub(crate) step_tokens: usize,
    /// Seconds within which each exchange between ranks must happen, else a rank counts as lost
    #[arg(long, default_value_t = 60)]
    pub(crate) step_timeout: u64,
}

/// What links ranks.
#[derive(Args, Clone, Default)]
pub(crate) struct LinkArgs {
    /// What links the ranks: shm, verbs (RDMA) or tcp [default: the fastest that each pair allows]
    #[arg(long, value_name = "TRANSPORT")]
    transport: Option<Transport>,
    /// Connections per pair over TCP
    #[arg(long, default_value_t = 1, value_name = "N")]
    connections: usize,
    /// Encrypt what goes over TCP between ranks (TLS 1.3); RDMA, which can't be, is not used then
    #[arg(long)]
    encrypt: bool,
    /// Queue pairs of RDMA: rc or uc [default: uc on macOS, else rc]
    #[arg(long, value_name = "KIND")]
    rdma_kind: Option<QueueKind>,
    /// The verbs library, if it is not where the system looks
    #[arg(long, env = "YUNTA_RDMA_LIBRARY", value_name = "PATH")]
    rdma_library: Option<PathBuf>,
}

impl LinkArgs {
    pub(crate) fn config(&self) -> LinkConfig {
        let verbs = VerbsConfig::default();
        LinkConfig {
            transport: self.transport,
            connections: self.connections.max(1),
            is_encrypted: self.encrypt,
            verbs: VerbsConfig {
                library: self.rdma_library.clone(),
                kind: self.rdma_kind.unwrap_or(verbs.kind),
                ..verbs
            },
        }
    }
}

/// How a model is cut over local processes.
#[derive(Args, Clone, Default)]
pub(crate) struct CutArgs {
    /// Cut every layer over so many local processes (tensor parallelism)
    #[arg(long, visible_alias = "local-ranks", value_name = "N")]
    pub(crate) tensor: Option<usize>,
    /// Cut the layers into so many stages of `--tensor` processes each (alone: one process each)
    #[arg(
        long,
        value_name = "M",
        num_args = 0..=1,
        require_equals = false,
        default_missing_value = "2"
    )]
    pub(crate) pipeline: Option<usize>,
    /// Uneven cut within each stage, as proportions: 2,1,1
    #[arg(long, value_delimiter = ',', value_name = "SHARES")]
    pub(crate) tensor_shares: Option<Vec<f64>>,
    /// Uneven cut into stages, as proportions: 2,1
    #[arg(long, value_delimiter = ',', value_name = "SHARES")]
    pub(crate) pipeline_shares: Option<Vec<f64>>,
    #[command(flatten)]
    pub(crate) links: LinkArgs,
    /// Keep every rank to cores of its own, as many as it has threads (to emulate machines)
    #[arg(long)]
    pub(crate) pin: bool,
    /// Delay what ranks send by so many microseconds (to emulate a network)
    #[arg(long, default_value_t = 0, value_name = "US")]
    pub(crate) link_latency: u64,
    /// Limit each link between ranks to so many gigabits per second (to emulate a network)
    #[arg(long, value_name = "GBPS")]
    pub(crate) link_bandwidth: Option<f64>,
}

impl CutArgs {
    /// What was asked for to emulate several machines.
    pub(crate) fn emulation(&self) -> Emulation {
        Emulation { pin: self.pin, latency_us: self.link_latency, gbps: self.link_bandwidth }
    }

    /// The plan for a model of these dimensions.
    pub(crate) fn plan(&self, dims: &Dims) -> Result<Plan> {
        let shares = |n: Option<usize>, shares: &Option<Vec<f64>>, what: &str| {
            Ok(match (n, shares) {
                (Some(n), Some(s)) if n != s.len() => {
                    bail!("--{what} {n} does not go with {} --{what}-shares", s.len())
                }
                (_, Some(s)) => s.clone(),
                (n, None) => vec![1.0; n.unwrap_or(1)],
            })
        };
        let tensor = shares(self.tensor, &self.tensor_shares, "tensor")?;
        let pipeline = shares(self.pipeline, &self.pipeline_shares, "pipeline")?;
        let ranks = tensor.len() * pipeline.len();
        if ranks > 64 {
            bail!("{ranks} local ranks are too many: 64 is the most");
        }
        Ok(Plan::weighted(dims, &tensor, &pipeline)?)
    }
}

/// How tokens are chosen.
#[derive(Args, Clone)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token
    #[arg(long, alias = "temp", default_value_t = 0.7)]
    pub(crate) temperature: f32,
    /// Choose among the likeliest tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0)]
    pub(crate) top_p: f32,
    /// Choose among so many of the likeliest tokens (0: all)
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: usize,
    /// Drop tokens less likely than this times the likeliest
    #[arg(long, default_value_t = 0.0)]
    pub(crate) min_p: f32,
    /// Seed of the random draws [default: a random one]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Most tokens to generate
    #[arg(long, short = 'm', default_value_t = 512)]
    pub(crate) max_tokens: usize,
    /// Go on behind the end-of-sequence token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}
