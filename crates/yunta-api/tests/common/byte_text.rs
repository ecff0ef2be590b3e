//! A text model whose tokens are bytes, and two special ones.

use serde_json::{Map, Value};
use yunta_api::{TextDecoder, TextError, TextModel};

/// Ends a generation.
pub const EOS: u32 = 256;
/// Begins a prompt; a special token that may also be drawn.
pub const BOS: u32 = 257;

/// See the module.
pub struct ByteText;

impl TextModel for ByteText {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let bos = add_special.then_some(BOS);
        Ok(bos.into_iter().chain(text.bytes().map(u32::from)).collect())
    }

    fn render_chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let mut prompt = String::new();
        for message in messages.as_array().into_iter().flatten() {
            let role = message["role"].as_str().unwrap_or_default();
            let content = message["content"].as_str().unwrap_or_default();
            if content == "refuse me" {
                return Err(TextError::Template { reason: "refused".into() });
            }
            prompt += &format!("{role}:{content}\n");
        }
        if let Some(tools) = tools {
            prompt += &format!("tools:{tools}\n");
        }
        for (name, value) in extra {
            prompt += &format!("{name}={value}\n");
        }
        Ok(prompt + "assistant:")
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        Box::new(ByteDecoder(Vec::new()))
    }

    fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        u8::try_from(id).ok().map(|byte| vec![byte])
    }

    fn is_special(&self, id: u32) -> bool {
        id > 255
    }

    fn vocab_size(&self) -> usize {
        258
    }

    fn stop_tokens(&self) -> &[u32] {
        &[EOS]
    }
}

/// Bytes of a character that is not complete yet.
struct ByteDecoder(Vec<u8>);

impl TextDecoder for ByteDecoder {
    fn push(&mut self, id: u32) -> Result<String, TextError> {
        let Ok(byte) = u8::try_from(id) else { return Ok(String::new()) };
        self.0.push(byte);
        let mut complete = String::new();
        while let Err(error) = std::str::from_utf8(&self.0) {
            let Some(bad) = error.error_len() else {
                let rest = self.0.split_off(error.valid_up_to());
                complete += &self.flush()?;
                self.0 = rest;
                return Ok(complete);
            };
            let rest = self.0.split_off(error.valid_up_to() + bad);
            complete += &self.flush()?;
            self.0 = rest;
        }
        Ok(complete + &self.flush()?)
    }

    fn flush(&mut self) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(&std::mem::take(&mut self.0)).into_owned())
    }
}
