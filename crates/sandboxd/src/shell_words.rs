//! Splits a command line into words as a POSIX shell does, without expansion. It handles quotes and
//! backslashes; variables, globs, pipes, redirections and comments are ordinary characters.

/// Why a command line cannot be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WordsError {
    #[error("No closing quotation")]
    OpenQuote,
    #[error("No escaped character")]
    TrailingBackslash,
}

/// The words of `line`. Inside double quotes a backslash escapes only `"` and itself.
pub fn split(line: &str) -> Result<Vec<String>, WordsError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        match character {
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            '\\' => {
                let escaped = characters.next().ok_or(WordsError::TrailingBackslash)?;
                word.get_or_insert_default().push(escaped);
            }
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match characters.next().ok_or(WordsError::OpenQuote)? {
                        '\'' => break,
                        literal => word.push(literal),
                    }
                }
            }
            '"' => double_quoted(&mut characters, word.get_or_insert_default())?,
            literal => word.get_or_insert_default().push(literal),
        }
    }
    words.extend(word);
    Ok(words)
}

fn double_quoted(
    characters: &mut std::str::Chars<'_>,
    word: &mut String,
) -> Result<(), WordsError> {
    loop {
        match characters.next().ok_or(WordsError::OpenQuote)? {
            '"' => return Ok(()),
            '\\' => match characters.next().ok_or(WordsError::TrailingBackslash)? {
                escaped @ ('"' | '\\') => word.push(escaped),
                other => word.extend(['\\', other]),
            },
            literal => word.push(literal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_are_split_as_by_a_shell() {
        let table: &[(&str, &[&str])] = &[
            ("", &[]),
            ("  \t\n ", &[]),
            ("echo hello", &["echo", "hello"]),
            ("echo  'a  b'  c", &["echo", "a  b", "c"]),
            (r#"echo "a 'b' c""#, &["echo", "a 'b' c"]),
            (r#"echo "\"\\\$x""#, &["echo", r#""\\$x"#]),
            (r"a\ b c", &["a b", "c"]),
            (r"'\n'", &[r"\n"]),
            ("''", &[""]),
            (r#"a""b ''"#, &["ab", ""]),
            (
                "echo # not a comment",
                &["echo", "#", "not", "a", "comment"],
            ),
            (
                "ls *.py | wc > $HOME",
                &["ls", "*.py", "|", "wc", ">", "$HOME"],
            ),
            ("écho 'ü b'", &["écho", "ü b"]),
        ];
        for (line, words) in table {
            assert_eq!(split(line).unwrap(), *words, "{line}");
        }
    }

    #[test]
    fn unfinished_lines_name_what_is_missing() {
        assert_eq!(split("echo 'a"), Err(WordsError::OpenQuote));
        assert_eq!(split("echo \"a"), Err(WordsError::OpenQuote));
        assert_eq!(split("echo \\"), Err(WordsError::TrailingBackslash));
        assert_eq!(split("\"\\"), Err(WordsError::TrailingBackslash));
    }

    proptest! {
        #[test]
        fn quoted_words_round_trip(words in proptest::collection::vec("\\PC*", 0..6)) {
            let line = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect::<Vec<_>>().join(" ");
            prop_assert_eq!(split(&line).unwrap(), words);
        }

        #[test]
        fn no_line_panics(line in "\\PC*") {
            let _ = split(&line);
        }
    }
}
