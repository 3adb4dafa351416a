//! Parses label selectors in their string form, with the error messages of kube-apiserver.

use super::{Error, Operator, Requirement};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    End,
    Open,
    Close,
    Comma,
    Not,
    Equals,
    NotEquals,
    Greater,
    Less,
    In,
    NotIn,
    Word(&'a str),
    Unknown(&'a str),
}

impl<'a> Token<'a> {
    /// The token as written, for error messages.
    fn literal(self) -> &'a str {
        match self {
            Token::End => "",
            Token::Open => "(",
            Token::Close => ")",
            Token::Comma => ",",
            Token::Not => "!",
            Token::Equals => "=",
            Token::NotEquals => "!=",
            Token::Greater => ">",
            Token::Less => "<",
            Token::In => "in",
            Token::NotIn => "notin",
            Token::Word(word) | Token::Unknown(word) => word,
        }
    }

    /// Turns `in` and `notin` into identifiers where a key or value is expected.
    fn as_value(self) -> Self {
        match self {
            Token::In | Token::NotIn => Token::Word(self.literal()),
            other => other,
        }
    }
}

/// Parses the requirements of a selector in its string form.
pub(super) fn parse(text: &str) -> Result<Vec<Requirement>, Error> {
    Parser { rest: text }.selector()
}

struct Parser<'a> {
    rest: &'a str,
}

const SPECIAL: [char; 7] = ['=', '!', '(', ')', ',', '>', '<'];
const EXPECTED_OPERATORS: &str = "in, notin, =, ==, !=, gt, lt";

impl<'a> Parser<'a> {
    fn next(&mut self) -> Token<'a> {
        let text = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
        let symbols = [
            ("!=", Token::NotEquals),
            ("==", Token::Equals),
            ("=", Token::Equals),
            ("!", Token::Not),
            ("(", Token::Open),
            (")", Token::Close),
            (",", Token::Comma),
            (">", Token::Greater),
            ("<", Token::Less),
        ];
        if text.is_empty() {
            self.rest = text;
            return Token::End;
        }
        for (symbol, token) in symbols {
            if let Some(rest) = text.strip_prefix(symbol) {
                self.rest = rest;
                return token;
            }
        }
        let end = text
            .find(|c: char| SPECIAL.contains(&c) || c.is_ascii_whitespace())
            .unwrap_or(text.len());
        // Whitespace that is neither skipped nor part of an identifier (a form feed) must still be consumed.
        let end = if end == 0 {
            text.chars().next().map_or(0, char::len_utf8)
        } else {
            end
        };
        let (word, rest) = text.split_at(end);
        self.rest = rest;
        match word {
            "in" => Token::In,
            "notin" => Token::NotIn,
            word if word.starts_with('\u{c}') => Token::Unknown(word),
            word => Token::Word(word),
        }
    }

    fn peek(&mut self) -> Token<'a> {
        let before = self.rest;
        let token = self.next();
        self.rest = before;
        token
    }

    fn selector(&mut self) -> Result<Vec<Requirement>, Error> {
        let mut requirements = Vec::new();
        if self.peek() == Token::End {
            return Ok(requirements);
        }
        loop {
            match self.peek().as_value() {
                Token::Word(_) | Token::Not => {}
                other => {
                    return Err(Error(format!(
                        "found '{}', expected: !, identifier, or 'end of string'",
                        other.literal()
                    )));
                }
            }
            let requirement = self
                .requirement()
                .map_err(|error| Error(format!("unable to parse requirement: {error}")))?;
            requirements.push(requirement);
            match self.next() {
                Token::End => return Ok(requirements),
                Token::Comma => match self.peek().as_value() {
                    Token::Word(_) | Token::Not => {}
                    other => {
                        return Err(Error(format!(
                            "found '{}', expected: identifier after ','",
                            other.literal()
                        )));
                    }
                },
                other => {
                    return Err(Error(format!(
                        "found '{}', expected: ',' or 'end of string'",
                        other.literal()
                    )));
                }
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, Error> {
        let mut token = self.next();
        let absent = token == Token::Not;
        if absent {
            token = self.next();
        }
        let Token::Word(key) = token.as_value() else {
            return Err(Error(format!(
                "found '{}', expected: identifier",
                token.literal()
            )));
        };
        if absent {
            return Requirement::new(key, Operator::DoesNotExist, Vec::new());
        }
        if matches!(self.peek(), Token::End | Token::Comma) {
            return Requirement::new(key, Operator::Exists, Vec::new());
        }
        let operator = match self.next() {
            Token::In => Operator::In,
            Token::NotIn => Operator::NotIn,
            Token::Equals => Operator::Equals,
            Token::NotEquals => Operator::NotEquals,
            Token::Greater => Operator::GreaterThan,
            Token::Less => Operator::LessThan,
            other => {
                return Err(Error(format!(
                    "found '{}', expected: {EXPECTED_OPERATORS}",
                    other.literal()
                )));
            }
        };
        let values = match operator {
            Operator::In | Operator::NotIn => self.set()?,
            _ => vec![self.single_value()?],
        };
        Requirement::new(key, operator, values)
    }

    /// The value after `=`. A missing value is the empty string.
    fn single_value(&mut self) -> Result<String, Error> {
        match self.peek().as_value() {
            Token::End | Token::Comma => Ok(String::new()),
            Token::Word(word) => {
                self.next();
                Ok(word.to_owned())
            }
            other => Err(Error(format!(
                "found '{}', expected: identifier",
                other.literal()
            ))),
        }
    }

    fn set(&mut self) -> Result<Vec<String>, Error> {
        let open = self.next();
        if open != Token::Open {
            return Err(Error(format!("found '{}' expected: '('", open.literal())));
        }
        let mut values = Vec::new();
        loop {
            match self.next().as_value() {
                Token::Word(word) => {
                    values.push(word.to_owned());
                    match self.next() {
                        Token::Comma => {}
                        Token::Close => return Ok(values),
                        other => {
                            return Err(Error(format!(
                                "found '{}', expected: ',' or ')'",
                                other.literal()
                            )));
                        }
                    }
                }
                // Nothing between two commas, or before the closing bracket, is the empty value.
                Token::Comma => values.push(String::new()),
                Token::Close => {
                    values.push(String::new());
                    return Ok(values);
                }
                other => {
                    return Err(Error(format!(
                        "found '{}', expected: ',', ')' or identifier",
                        other.literal()
                    )));
                }
            }
        }
    }
}
