//! What bytes a token stands for: the rules of a tokenizer.json's `decoder`, one token at a time.

use std::collections::HashMap;

use serde_json::Value;

/// Turns tokens into bytes as the `tokenizers` library's decoders do.
pub(crate) enum Decoder {
    /// GPT-2's: each character stands for one byte.
    ByteLevel(HashMap<char, u8>),
    /// SentencePiece's: pieces of text, with a character that stands for a space.
    Pieces(Pieces),
}

/// How pieces become text.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Pieces {
    /// Replaced in each piece, in this order.
    replace: Vec<(String, String)>,
    /// `<0xAB>` stands for a byte.
    byte_fallback: bool,
    /// Dropped where it begins the whole text, so many times.
    strip: Option<(char, usize)>,
    /// Dropped wherever it occurs in the first piece.
    drop_in_first: Option<char>,
}

impl Decoder {
    /// From the `decoder` of a tokenizer.json.
    ///
    /// # Errors
    /// The name of a rule that language models do not use, and that is not known here.
    pub(crate) fn parse(json: &Value) -> Result<Self, String> {
        let rules = match json.get("decoders").and_then(Value::as_array) {
            Some(rules) => rules.as_slice(),
            None => std::slice::from_ref(json),
        };
        let kind = |rule: &Value| rule.get("type").and_then(Value::as_str).map(str::to_owned);
        if let [rule] = rules
            && kind(rule).as_deref() == Some("ByteLevel")
        {
            return Ok(Self::ByteLevel(byte_alphabet().collect()));
        }
        let mut pieces = Pieces::default();
        let mut fused = false;
        for rule in rules {
            let kind = kind(rule).unwrap_or_else(|| "none".to_owned());
            let known = match kind.as_str() {
                "Fuse" => {
                    fused = true;
                    true
                }
                "Strip" if fused => pieces.add_strip(rule).is_some(),
                "Replace" if !fused => pieces.add_replace(rule).is_some(),
                "Metaspace" if !fused => pieces.add_metaspace(rule).is_some(),
                "ByteFallback" if !fused => {
                    pieces.byte_fallback = true;
                    true
                }
                _ => false,
            };
            if !known {
                return Err(format!("decoder `{kind}` is not supported here"));
            }
        }
        Ok(Self::Pieces(pieces))
    }

    /// The bytes of a token in the middle of a text.
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            // A token with a character outside the alphabet stands for itself.
            Self::ByteLevel(alphabet) => {
                let bytes = token.chars().map(|c| alphabet.get(&c).copied()).collect();
                Option::unwrap_or_else(bytes, || token.as_bytes().to_vec())
            }
            Self::Pieces(pieces) => pieces.bytes(token),
        }
    }

    /// The bytes of the first token of a text.
    pub(crate) fn first_bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::Pieces(Pieces { drop_in_first: Some(c), .. }) => {
                self.bytes(&token.replace(*c, ""))
            }
            _ => self.bytes(token),
        }
    }

    /// What is dropped where it begins the whole text, and how many times at most.
    pub(crate) fn strip(&self) -> Option<(char, usize)> {
        match self {
            Self::Pieces(pieces) => pieces.strip,
            Self::ByteLevel(_) => None,
        }
    }

    /// Replacement characters for so many bytes that are no text.
    pub(crate) fn replacements(&self, bytes: usize) -> usize {
        match self {
            Self::Pieces(pieces) if pieces.byte_fallback => bytes,
            _ => 1,
        }
    }
}

impl Pieces {
    fn add_strip(&mut self, rule: &Value) -> Option<()> {
        let count = |field: &str| usize::try_from(rule.get(field)?.as_u64()?).ok();
        let content = single_char(rule.get("content")?)?;
        if count("stop")? != 0 || self.strip.is_some() {
            return None;
        }
        self.strip = Some((content, count("start")?));
        Some(())
    }

    fn add_replace(&mut self, rule: &Value) -> Option<()> {
        // Behind the byte fallback, it would concern the bytes too.
        let from = rule.get("pattern")?.get("String")?.as_str()?;
        if self.byte_fallback || from.is_empty() {
            return None;
        }
        self.replace.push((from.to_owned(), rule.get("content")?.as_str()?.to_owned()));
        Some(())
    }

    fn add_metaspace(&mut self, rule: &Value) -> Option<()> {
        let replacement = single_char(rule.get("replacement")?)?;
        if rule.get("prepend_scheme")?.as_str()? != "never" {
            self.drop_in_first = Some(replacement);
        }
        self.replace.push((replacement.to_string(), " ".to_owned()));
        Some(())
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        let mut text = token.to_owned();
        for (from, to) in &self.replace {
            text = text.replace(from, to);
        }
        let hex = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
        let byte = hex.filter(|hex| self.byte_fallback && hex.len() == 2);
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => vec![byte],
            None => text.into_bytes(),
        }
    }
}

fn single_char(value: &Value) -> Option<char> {
    let mut chars = value.as_str()?.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// GPT-2's characters and the bytes they stand for: printable Latin-1 characters stand for
/// themselves, the other bytes for characters from U+0100 on.
fn byte_alphabet() -> impl Iterator<Item = (char, u8)> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let themselves = (0..=u8::MAX).filter(printable).map(|b| (char::from(b), b));
    let others = (0..=u8::MAX).filter(move |b| !printable(b));
    themselves.chain(others.zip('\u{100}'..).map(|(b, c)| (c, b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn byte_level_characters_stand_for_bytes() {
        let decoder = Decoder::parse(&json!({"type": "ByteLevel"})).unwrap();
        assert_eq!(decoder.bytes("Ġnaïve"), [32, b'n', b'a', 0xEF, b'v', b'e']);
        assert_eq!(decoder.bytes("<｜a｜>"), "<｜a｜>".as_bytes());
    }

    #[test]
    fn pieces_follow_their_rules() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]});
        let decoder = Decoder::parse(&llama).unwrap();
        assert_eq!(decoder.bytes("▁a▁"), b" a ");
        assert_eq!(decoder.bytes("<0xC3>"), [0xC3]);
        assert_eq!(decoder.strip(), Some((' ', 1)));
        let metaspace = json!({
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true,
        });
        let decoder = Decoder::parse(&metaspace).unwrap();
        assert_eq!(decoder.first_bytes("▁a▁b"), b"ab");
        assert_eq!(decoder.bytes("▁a▁b"), b" a b");
        assert_eq!(decoder.bytes("<0x41>"), b"<0x41>");
    }

    #[test]
    fn unknown_rules_are_refused_by_name() {
        let refused = |json| Decoder::parse(&json).err().unwrap();
        assert!(refused(json!({"type": "WordPiece", "prefix": "##"})).contains("WordPiece"));
        assert!(refused(Value::Null).contains("none"));
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 1});
        assert!(refused(json!({"decoders": [{"type": "Fuse"}, strip]})).contains("Strip"));
    }
}
