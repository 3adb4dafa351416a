//! Escapes control characters and bidirectional overrides in text from a sandbox or the API, against terminal escape injection and
//! "Trojan Source".
//!
//! The output of `logs`, `exec` and `cp` is not escaped, as with kubectl.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a character controls the terminal or the direction of text.
fn is_hidden(character: char) -> bool {
    matches!(
        character,
        '\0'..='\x1f'
            | '\x7f'..='\u{9f}'
            | '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// One line of text, such as the cell of a table.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden)
}

/// Text that may have several lines.
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(text, |character| character != '\n' && is_hidden(character))
}

fn escaped(text: &str, is_hidden: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            character if !is_hidden(character) => shown.push(character),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            '\0'..='\u{ff}' => {
                let _ = write!(shown, "\\x{:02x}", u32::from(character));
            }
            _ => shown.extend(character.escape_unicode()),
        }
    }
    Cow::Owned(shown)
}

/// A JSON document. Control characters that the encoder leaves can only be in strings, and get JSON's escapes: the document stays the
/// same.
pub fn json(document: &str) -> Cow<'_, str> {
    let is_hidden = |character: char| character != '\n' && is_hidden(character);
    if !document.chars().any(is_hidden) {
        return Cow::Borrowed(document);
    }
    let mut shown = String::with_capacity(document.len() + 8);
    for character in document.chars() {
        if is_hidden(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown_instead() {
        for (text, shown) in [
            (
                "plain, with umlauts: ä, 漢字 and 👍",
                "plain, with umlauts: ä, 漢字 and 👍",
            ),
            ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
            ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
            ("\u{9b}31m", "\\x9b31m"),
            ("a\rb\tc\u{8}\x7f", "a\\rb\\tc\\x08\\x7f"),
            ("\u{202e}gpj.exe", "\\u{202e}gpj.exe"),
            ("\u{2066}x\u{2069}", "\\u{2066}x\\u{2069}"),
            ("zero\u{200b}width\u{feff}", "zero\\u{200b}width\\u{feff}"),
            ("tag\u{e0041}", "tag\\u{e0041}"),
        ] {
            assert_eq!(line(text), shown);
        }
        assert_eq!(line("two\nlines"), "two\\nlines");
        assert_eq!(text("two\nlines\x1b"), "two\nlines\\x1b");
    }

    #[test]
    fn a_json_document_stays_the_same() {
        let value =
            json!({ "a\u{9b}": ["\x1b[31m", "\u{202e}", "\u{e0041}", "\n", "\x7f", "ä👍"] });
        let document = serde_json::to_string_pretty(&value).unwrap();
        let shown = json(&document);
        assert!(
            !shown.chars().any(|one| one != '\n' && is_hidden(one)),
            "{shown}"
        );
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), value);
    }
}
