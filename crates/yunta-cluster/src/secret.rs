//! The secret that the processes of one instance share.

use std::io::Read;

use crate::ClusterError;

/// 32 random bytes: ranks prove with it that they belong to the instance.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// A fresh one.
    pub(crate) fn random() -> Result<Self, ClusterError> {
        let mut bytes = [0; 32];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut f| f.read_exact(&mut bytes))
            .map_err(ClusterError::Random)?;
        Ok(Self(bytes))
    }

    pub(crate) fn hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }

    pub(crate) fn from_hex(hex: &str) -> Result<Self, ClusterError> {
        let bad =
            || ClusterError::Config("the instance's secret is not 64 hexadecimal digits".into());
        if hex.len() != 64 || !hex.is_ascii() {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (i, b) in bytes.iter_mut().enumerate() {
            let digits = hex.get(2 * i..2 * i + 2).ok_or_else(bad)?;
            *b = u8::from_str_radix(digits, 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Compares in a time that does not depend on where the two differ.
    pub(crate) fn matches(&self, hex: &str) -> bool {
        let own = self.hex();
        own.len() == hex.len()
            && own.bytes().zip(hex.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_survives_hexadecimal_and_matches_only_itself() {
        let (a, b) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert!(Secret::from_hex(&a.hex()).unwrap() == a);
        assert!(a.matches(&a.hex()) && !a.matches(&b.hex()) && !a.matches(""));
        assert!(Secret::from_hex("zz").is_err());
    }
}
