//! Of [`sample`] as a whole.

use proptest::prelude::*;

use super::*;

fn params(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..SamplingParams::default() }
}

/// Draws at a position, where the output is token 0 again and again.
fn at(logits: &[f32], params: &SamplingParams, position: usize) -> Option<u32> {
    sample(logits, params, &Draw { output: &vec![0; position], ..Draw::default() })
}

/// Checks that draws follow the expected distribution.
fn check_distribution(logits: &[f32], params: &SamplingParams, expected: &[f64]) {
    let n = 20_000u64;
    let mut counts = vec![0usize; logits.len()];
    for seed in 0..n {
        let params = SamplingParams { seed, ..params.clone() };
        counts[at(logits, &params, 3).unwrap() as usize] += 1;
    }
    let total: f64 = expected.iter().sum();
    for (count, weight) in counts.iter().zip(expected) {
        let (expected, got) = (weight / total, *count as f64 / n as f64);
        let deviation = (expected * (1.0 - expected) / n as f64).sqrt();
        assert!((got - expected).abs() <= 4.0 * deviation + 1e-9, "{got} for {expected}");
    }
}

#[test]
fn temperature_zero_takes_the_likeliest() {
    assert_eq!(at(&[0.5, 3.0, -1.0, 3.0], &params(0.0), 7), Some(1));
}

#[test]
fn greedy_heeds_what_changes_the_logits() {
    let biased = SamplingParams { logit_bias: vec![(0, 100.0)], ..params(0.0) };
    assert_eq!(at(&[0.5, 3.0], &biased, 0), Some(0));
    let banned = SamplingParams { logit_bias: vec![(1, -100.0)], ..params(0.0) };
    assert_eq!(at(&[0.5, 3.0], &banned, 0), Some(0));
    let penalised = SamplingParams { presence_penalty: 2.0, ..params(0.0) };
    assert_eq!(at(&[3.0, 2.0], &penalised, 1), Some(1));
}

#[test]
fn garbage_draws_nothing() {
    assert_eq!(at(&[], &params(1.0), 0), None);
    assert_eq!(at(&[1.0, f32::NAN], &params(1.0), 0), None);
    assert_eq!(at(&[f32::NEG_INFINITY; 3], &params(1.0), 0), None);
    // A mask does not hide it.
    let draw = Draw { allowed: Some(&[0b01]), ..Draw::default() };
    assert_eq!(sample(&[1.0, f32::NAN], &params(1.0), &draw), None);
}

#[test]
fn a_mask_that_forbids_everything_draws_nothing() {
    for allowed in [&[][..], &[0], &[0b100]] {
        let draw = Draw { allowed: Some(allowed), ..Draw::default() };
        assert_eq!(sample(&[1.0, 2.0, f32::NEG_INFINITY], &params(1.0), &draw), None);
    }
}

#[test]
fn stop_tokens_come_after_the_least_number_of_tokens() {
    let params = SamplingParams { min_tokens: 3, ..params(0.5) };
    for position in 0..6 {
        let output = vec![0; position];
        let draw = Draw { output: &output, stop_tokens: &[1], ..Draw::default() };
        let expected = if position < 3 { 0 } else { 1 };
        assert_eq!(sample(&[0.0, 50.0], &params, &draw), Some(expected));
    }
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0f32, 1.0, 2.0, -30.0];
    let weights = logits.map(|x| f64::from(x / 0.7).exp());
    check_distribution(&logits, &params(0.7), &weights);
}

#[test]
fn draws_follow_the_distribution_that_truncation_leaves() {
    let logits: Vec<f32> = [0.1f32, 0.5, 0.05, 0.25, 0.1].iter().map(|p| p.ln()).collect();
    let base = params(1.0);
    let top_k = SamplingParams { top_k: 2, ..base.clone() };
    check_distribution(&logits, &top_k, &[0.0, 0.5, 0.0, 0.25, 0.0]);
    let top_p = SamplingParams { top_p: 0.8, ..base.clone() };
    check_distribution(&logits, &top_p, &[0.1, 0.5, 0.0, 0.25, 0.0]);
    let min_p = SamplingParams { min_p: 0.15, ..base.clone() };
    check_distribution(&logits, &min_p, &[0.1, 0.5, 0.0, 0.25, 0.1]);
    // In half of all draws the two tokens above 0.2 shrink to one.
    let xtc = SamplingParams { xtc_probability: 0.5, xtc_threshold: 0.2, ..base };
    let (without, with): ([f64; 5], [f64; 5]) =
        ([0.1, 0.5, 0.05, 0.25, 0.1], [0.2, 0.0, 0.1, 0.5, 0.2]);
    let mixed: Vec<f64> = without.iter().zip(with).map(|(a, b)| (a + b) / 2.0).collect();
    check_distribution(&logits, &xtc, &mixed);
}

/// Any parameters at all, sensible or not.
fn anything() -> impl Strategy<Value = SamplingParams> {
    let number = || any::<f32>();
    let mixed = || prop_oneof![Just(0.0f32), Just(1.0), 0.0f32..2.0, number()];
    let penalties = (mixed(), mixed(), mixed(), mixed(), mixed());
    let truncation = (mixed(), 0usize..70, mixed(), mixed(), mixed(), mixed(), mixed());
    let bias = prop::collection::vec((0u32..80, number()), 0..4);
    let breakers = prop::collection::vec(0u32..80, 0..4);
    (penalties, truncation, bias, breakers, 0usize..6, 0usize..6, any::<u64>()).prop_map(
        |(p, t, logit_bias, dry_breakers, small, min_tokens, seed)| SamplingParams {
            logit_bias,
            min_tokens,
            repetition_penalty: p.0,
            frequency_penalty: p.1,
            presence_penalty: p.2,
            dry_multiplier: p.3,
            dry_base: p.4,
            dry_allowed_length: small,
            dry_range: small * 3,
            dry_breakers,
            temperature: t.0,
            top_k: t.1,
            typical_p: t.2,
            top_p: t.3,
            min_p: t.4,
            xtc_probability: t.5,
            xtc_threshold: t.6,
            seed,
        },
    )
}

/// Parameters within their ranges.
fn sensible() -> impl Strategy<Value = SamplingParams> {
    let penalties = (0.5f32..2.0, -2.0f32..2.0, -2.0f32..2.0, 0.0f32..5.0, 1.0f32..3.0);
    let truncation =
        (0.0f32..3.0, 0usize..20, 0f32..=1.0, 0f32..=1.0, 0f32..=1.0, 0f32..=1.0, 0f32..=1.0);
    (penalties, truncation, anything()).prop_map(|(p, t, rest)| SamplingParams {
        logit_bias: vec![(0, 100.0), (1, -100.0), (2, 3.0)],
        repetition_penalty: p.0,
        frequency_penalty: p.1,
        presence_penalty: p.2,
        dry_multiplier: p.3,
        dry_base: p.4,
        temperature: t.0,
        top_k: t.1,
        typical_p: t.2,
        top_p: t.3,
        min_p: t.4,
        xtc_probability: t.5,
        xtc_threshold: t.6,
        ..rest
    })
}

proptest! {
    #[test]
    fn no_parameters_panic_and_none_break_the_mask(
        logits in prop::collection::vec(prop_oneof![-20.0f32..20.0, any::<f32>()], 0..70),
        params in anything(),
        prompt in prop::collection::vec(0u32..80, 0..20),
        output in prop::collection::vec(0u32..80, 0..20),
        allowed in prop::option::of(prop::collection::vec(any::<u32>(), 0..3)),
    ) {
        let draw = Draw {
            prompt: &prompt, output: &output, stop_tokens: &[3, 79], allowed: allowed.as_deref(),
        };
        if let Some(token) = sample(&logits, &params, &draw) {
            prop_assert!((token as usize) < logits.len());
            prop_assert!(allowed.is_none_or(|words| words[token as usize / 32] >> (token % 32) & 1 == 1));
        }
    }

    #[test]
    fn sensible_parameters_always_leave_a_token(
        logits in prop::collection::vec(-20.0f32..20.0, 4..300),
        params in sensible(),
        prompt in prop::collection::vec(0u32..10, 0..30),
        output in prop::collection::vec(0u32..10, 0..30),
    ) {
        let draw = Draw { prompt: &prompt, output: &output, stop_tokens: &[3], allowed: None };
        let token = sample(&logits, &params, &draw);
        prop_assert!(token.is_some_and(|t| (t as usize) < logits.len()));
        prop_assert!(output.len() >= params.min_tokens || token != Some(3));
        prop_assert_eq!(token, sample(&logits, &params, &draw));
        let mut permuted = params;
        permuted.logit_bias.reverse();
        prop_assert_eq!(token, sample(&logits, &permuted, &draw));
    }
}

/// Not a benchmark: times of a large vocabulary, to look at.
/// `cargo test --release -p yunta-engine -- --ignored --nocapture times`
#[test]
#[ignore = "prints times"]
fn times_of_a_large_vocabulary() {
    // Sums of uniform numbers are nearly normal, as logits are.
    let noise = |i: usize| (0..4).map(|j| pick::uniform(j, i) as f32 - 0.5).sum::<f32>();
    let logits: Vec<f32> = (0..150_000).map(|i| 5.0 * noise(i)).collect();
    let base = params(0.8);
    let cases = [
        ("greedy", params(0.0)),
        ("temperature", base.clone()),
        ("top-k, top-p", SamplingParams { top_k: 40, top_p: 0.9, ..base.clone() }),
        ("top-p", SamplingParams { top_p: 0.9, ..base.clone() }),
        ("min-p", SamplingParams { min_p: 0.05, ..base.clone() }),
        ("typical", SamplingParams { typical_p: 0.9, ..base.clone() }),
        ("penalties", SamplingParams { repetition_penalty: 1.1, top_k: 40, ..base.clone() }),
        ("dry", SamplingParams { dry_multiplier: 0.8, top_k: 40, ..base }),
    ];
    let prompt: Vec<u32> = (0..8_000).map(|i| i * 7 % 3_000).collect();
    for (name, params) in cases {
        let start = std::time::Instant::now();
        let draw = Draw { prompt: &prompt, ..Draw::default() };
        let runs = 50;
        for seed in 0..runs {
            let params = SamplingParams { seed, ..params.clone() };
            std::hint::black_box(sample(std::hint::black_box(&logits), &params, &draw));
        }
        let each = start.elapsed().as_secs_f64() / runs as f64;
        println!("{name}: {:.3} ms", each * 1e3);
    }
}
