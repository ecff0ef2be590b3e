//! Names of the variants of an enumeration, as people write and read them.

/// Implements `Display` and `FromStr` from a table.
macro_rules! names {
    ($type:ident { $($variant:ident => $name:literal),* $(,)? }) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $name,)*
                })
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(name: &str) -> Result<Self, String> {
                match name {
                    $($name => Ok(Self::$variant),)*
                    _ => Err(format!("{name:?} is none of {}", [$($name),*].join(", "))),
                }
            }
        }
    };
}

pub(crate) use names;
